//! A closed owner cannot be used.

fn main() {}

fn mapping(mapping: cuvmm::Mapping) {
    drop(mapping.close());
    drop(mapping.write(0, b"late"));
}

fn physical(reservation: &cuvmm::Reservation, physical: cuvmm::Physical) {
    drop(physical.close());
    drop(reservation.map(0, &physical));
}

fn pool(pool: cuvmm::Pool) {
    drop(pool.close());
    pool.tenant("late");
}
