//! The bytes of blocks: each has its own, and none of another tenant.

use crate::common::{self, G, host};
use crate::scene::{LAYERS, LAYOUTS, builder, stamps};
use cuvmm::PagedKv;

/// The byte of a block's part at an index.
fn byte(number: u32, layer: u32, part: usize, at: usize) -> u8 {
    (number as usize * 31 + layer as usize * 7 + part * 3 + at / 4096) as u8
}

fn bytes(kv: &PagedKv, number: u32, layer: u32, part: usize) -> Vec<u8> {
    let [_, tokens, heads, size] = kv.view(0, layer, part).unwrap().shape();
    let bytes = (tokens * heads * size * 4) as usize;
    (0..bytes).map(|at| byte(number, layer, part, at)).collect()
}

#[test]
fn no_block_shows_bytes_of_another() {
    const BLOCKS: u32 = 24;
    for layout in LAYOUTS {
        let rig = host();
        let (_pool, a, home) = common::scene(&rig, 64);
        let kv = builder(&a, &home, BLOCKS, layout).build().unwrap();
        kv.back(&(0..BLOCKS).collect::<Vec<_>>()).unwrap();
        let parts =
            |number| (0..LAYERS).flat_map(move |layer| [0, 1].map(|part| (number, layer, part)));
        for (number, layer, part) in (0..BLOCKS).flat_map(parts) {
            let bytes = bytes(&kv, number, layer, part);
            kv.write(number, (0, layer, part), &bytes).unwrap();
        }
        // Half of them go, and take no byte of the others along.
        let odd: Vec<u32> = (1..BLOCKS).step_by(2).collect();
        kv.release(&odd).unwrap();
        kv.purge().unwrap();
        let rewritten = |number: u32| number % 4 == 1;
        let again: Vec<u32> = (0..BLOCKS).filter(|&it| rewritten(it)).collect();
        kv.back(&again).unwrap();
        for (number, layer, part) in again.iter().copied().flat_map(parts) {
            let bytes = bytes(&kv, number, layer, part);
            kv.write(number, (0, layer, part), &bytes).unwrap();
        }
        for (number, layer, part) in (0..BLOCKS).flat_map(parts) {
            let known = bytes(&kv, number, layer, part);
            let mut read = vec![0; known.len()];
            let outcome = kv.read(number, (0, layer, part), &mut read);
            let in_use = number % 2 == 0 || rewritten(number);
            assert_eq!(outcome.is_ok(), in_use, "{layout:?} {number}");
            assert!(
                !in_use || read == known,
                "{layout:?} block {number} {layer} {part}"
            );
        }
    }
}

#[test]
fn what_another_tenant_wrote_reads_as_zero() {
    for layout in LAYOUTS {
        let rig = host();
        let (_pool, [a, b], home) = common::pair(&rig, 16);
        let kv = builder(&a, &home, 16, layout).build().unwrap();
        let all: Vec<u32> = (0..16).collect();
        let wrote = |bytes: &[u8; 6]| {
            let block = b.allocate(16 * G).unwrap();
            for at in 0..16 {
                let mut read = [1; 6];
                block.read(at * G, &mut read).unwrap();
                assert!(read == [0; 6] || read == *bytes, "the cache's bytes");
                block.write(at * G, bytes).unwrap();
            }
        };
        wrote(b"secret");
        for _ in 0..2 {
            kv.back(&all).unwrap();
            for number in 0..16 {
                assert_eq!(stamps(&rig, &kv, number), [0; 16]);
                for (layer, part) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let bytes = bytes(&kv, number, layer, part);
                    kv.write(number, (0, layer, part), &bytes).unwrap();
                }
            }
            kv.release(&all).unwrap();
            wrote(b"secret");
        }
    }
}
