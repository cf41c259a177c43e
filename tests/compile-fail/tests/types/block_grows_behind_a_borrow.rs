//! A shared reference to a block can neither grow nor shrink it.

fn main() {}

fn grow(block: &cuvmm::Block) {
    drop(block.try_grow_to(4096));
}
