//! A freed block can be neither read nor leased.

fn main() {}

fn freed(block: cuvmm::Block) {
    drop(block.free());
    drop(block.lease());
}

fn dropped(block: cuvmm::Block) {
    drop(block);
    drop(block.write(0, b"late"));
}
