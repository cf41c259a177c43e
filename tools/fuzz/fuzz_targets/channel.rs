//! A peer that sends arbitrary bytes, to an importer, an exporter and a subscriber: no descriptor
//! is left open, nothing stays mapped, and no call waits forever.

#![no_main]

#[path = "../../../tests/cuvmm-tests/tests/share_support/mod.rs"]
mod share_support;

use std::sync::Arc;
use std::time::Instant;

use cuvmm::driver::model::{Machine, ModelDriver, ModelOptions, Nothing};
use cuvmm::driver::{Driver, Exported, HandleTypes};
use cuvmm::share::Subscriber;
use cuvmm::{Attachment, Channel, Device, Offer, Region};
use libfuzzer_sys::fuzz_target;
use share_support::{PROMPT, Raw, Words, open_files};

fn open() -> (Arc<Machine<Nothing>>, Device) {
    let machine = Arc::new(ModelDriver::new(ModelOptions::new()));
    let driver: Arc<dyn Driver> = machine.clone();
    let device = Device::open(driver, 0).expect("a device");
    (machine, device)
}

fn listen(script: &[u8]) {
    let ((giver, from), (taker, to)) = (open(), open());
    let granule = from.granularity();
    let mut mine = Region::builder(&from, 3 * granule)
        .largest_extent(granule)
        .shareable(HandleTypes::POSIX_FD)
        .reserve()
        .expect("addresses");
    mine.commit(0..3 * granule).expect("memory");
    let offer = Offer::region(&mine, 0..3 * granule).expect("an offer");
    let (description, handles) = offer.parcel().expect("handles").into_parts();
    let handles = handles.into_iter().filter_map(|handle| match handle {
        Exported::Fd(fd) => Some(fd),
        _ => None,
    });
    let words = Words::new(description.to_bytes(), handles.collect());
    let how = Attachment::builder(&to);
    let begun = Instant::now();
    let hears = |listens: &dyn Fn(Channel)| {
        let (channel, mut peer) = Raw::pair();
        words.speak(&mut peer, script);
        listens(channel);
    };
    hears(&|mut channel| drop(channel.recv(&how)));
    hears(&|mut channel| drop(channel.send(&offer)));
    hears(&|channel| drop(Subscriber::from_channel(channel).attach("llama", &how)));
    assert!(begun.elapsed() < PROMPT);
    drop((words, offer, mine));
    for machine in [giver, taker] {
        assert!(machine.live().is_nothing(), "{:?}", machine.live());
    }
}

fuzz_target!(|script: &[u8]| {
    let before = open_files();
    listen(script);
    assert_eq!(open_files(), before);
});
