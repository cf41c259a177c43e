//! A block or mapping has one owner: two would release it twice.

fn main() {}

fn two(block: &cuvmm::Block) -> cuvmm::Block {
    block.clone()
}

fn twice(mapping: &cuvmm::Mapping) -> cuvmm::Mapping {
    mapping.clone()
}
