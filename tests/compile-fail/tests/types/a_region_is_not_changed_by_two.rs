//! Moving memory and granting access need exclusive use of the region.

use cuvmm::{Device, Place, Region, Access, Stream};

fn moves(region: &Region, place: &Place, stream: &Stream) {
    region.relocate(0..2, place, stream).unwrap();
}

fn grants(region: &Region, device: &Device) {
    region.grant(device, Access::Read).unwrap();
}

fn copies(region: Region) {
    let twin = region.clone();
    drop(twin);
}

fn main() {}
