//! No safe function takes or trusts a raw handle or address.

fn main() {}

fn handle(reservation: &cuvmm::Reservation, handle: cuvmm::driver::PhysicalHandle) {
    drop(reservation.map(0, &handle));
}

fn slice(block: &cuvmm::Block) -> &[u8] {
    &block.address()
}
