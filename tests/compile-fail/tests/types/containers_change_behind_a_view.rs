//! Elements lent to a kernel cannot be decommitted, consumed, replaced or dropped meanwhile.

use cuvmm::{CowBuffer, RingBuffer, SparseArray, SparseGrid};

fn sparse(mut array: SparseArray<u32>) {
    let view = array.view(0..10).unwrap();
    array.decommit(0..10).unwrap();
    println!("{}", view.address());
}

fn grid(mut grid: SparseGrid<u32, 3>) {
    let view = grid.view();
    grid.decommit_brick([0; 3]).unwrap();
    println!("{}", view.address());
}

fn ring(mut ring: RingBuffer<u32>) {
    let view = ring.filled();
    ring.consume(1).unwrap();
    println!("{}", view.len());
}

fn vacant(mut ring: RingBuffer<u32>) {
    let vacant = ring.spare_capacity_mut();
    ring.extend_from_slice(&[1]).unwrap();
    println!("{}", vacant.len());
}

fn snapshot(mut buffer: CowBuffer<u32>) {
    let writing = buffer.make_mut(0..10).unwrap();
    let snapshot = buffer.snapshot();
    println!("{} {snapshot:?}", writing.len());
}

fn dropped(buffer: CowBuffer<u32>) {
    let view = buffer.view();
    drop(buffer);
    println!("{}", view.len());
}

fn main() {}
