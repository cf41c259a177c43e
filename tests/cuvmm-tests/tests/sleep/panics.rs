//! A driver that panics in a call of a plain sleep or wake.

use super::exchange::{World, shows};
use crate::common;
use crate::common::G;
use crate::common::panics::panics_at;
use cuvmm::Contents;
use cuvmm::error::{BlockError, SleepError};

/// The blocks of one tenant fall asleep and those of the other wake, and the driver panics once in any
/// call of this thread. Nothing is unmapped or freed under the pool's lock or without proof, a block
/// whose memory was being worked on may be lost, and the pool goes on.
#[test]
fn a_block_that_the_driver_panicked_for_is_lost_at_most() {
    let mut ended = [false; 2];
    for (nth, wakes) in (1..80).flat_map(|nth| [(nth, false), (nth, true)]) {
        let rig = common::host();
        let world = World::new(&rig, 40, &[6 * G, G], &[4 * G, G]);
        let moves = || match wakes {
            true => world.asleep.blocks().wake().map(drop),
            false => {
                let contents = Contents::Keep(&world.store);
                world.awake.blocks().sleep(contents).map(drop)
            }
        };
        let (outcome, panicked) = panics_at(&rig, nth, |_| true, moves);
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
        ended[usize::from(wakes)] |= !panicked && outcome.is_some();
        // The other tenant, and new blocks, are as they should be.
        let (blocks, seed) = match wakes {
            true => (&world.old, 1),
            false => {
                world.asleep.blocks().wake().unwrap();
                (&world.new, 100)
            }
        };
        for (block, seed) in blocks.iter().zip(seed..) {
            shows(&rig, block, seed);
        }
        let moved = match wakes {
            true => &world.asleep,
            false => &world.awake,
        };
        if let Err(error) = moved.blocks().wake() {
            let is_lost = matches!(
                &error,
                SleepError::Block {
                    cause: BlockError::Memory(_) | BlockError::Unregistered(_),
                    ..
                }
            );
            assert!(is_lost, "{nth}: {error:?}");
        }
        let block = moved.allocate(4 * G).unwrap();
        block.write(0, &[7; 100]).unwrap();
        drop((block, world));
        let hazards = rig.machine.take_hazards();
        assert!(hazards.is_empty(), "{nth}: {}", hazards[0]);
        if ended == [true; 2] {
            return;
        }
    }
    panic!("the operations never end");
}
