//! A block and a mapping have one owner: two would give them back twice.

fn main() {}

fn two(block: &cuvmm::Block) -> cuvmm::Block {
    block.clone()
}

fn twice(mapping: &cuvmm::Mapping) -> cuvmm::Mapping {
    mapping.clone()
}
