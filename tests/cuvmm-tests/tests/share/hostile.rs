//! Peers whose messages are wrong, short, missing or out of order. Each causes an error in time,
//! with no descriptor left open and nothing mapped.

use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, cases, shareable_region};
use crate::share_support::{
    AdviceRecord, DESCRIPTION, HANDLES, Head, MOST_BODY, PROMPT, Raw, SHORT, TEXT, VERDICT, Words,
    leaves_nothing_open, lend,
};
use cuvmm::driver::{Call, Exported, HandleTypes, LocationKind};
use cuvmm::error::{
    ArgumentError, CallError, ChannelError, DescriptionError, MemoryError, ShareError,
};
use cuvmm::share::Subscriber;
use cuvmm::{Attachment, Channel, Device, Offer, Physical};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Returns a handle of memory.
fn handle(device: &Device, size: u64) -> OwnedFd {
    let physical = Physical::builder(device, size).shareable(FD).create();
    match physical.unwrap().export(FD).unwrap() {
        Exported::Fd(fd) => fd,
        other => panic!("{other:?}"),
    }
}

/// Returns the taker's error for what a peer sends. The taker holds nothing afterwards, and a peer
/// whose memory is refused has been notified.
fn take_from(said: impl FnOnce(&mut Raw, &Device)) -> ShareError {
    let (giver, taker) = (
        common::clean(common::model()),
        common::clean(common::model()),
    );
    let (mut channel, mut peer) = Raw::pair();
    said(&mut peer, &giver.device);
    let begun = Instant::now();
    let error = channel
        .recv(&Attachment::builder(&taker.device))
        .unwrap_err();
    assert!(begun.elapsed() < PROMPT, "{error}");
    if matches!(error, ShareError::Channel(_)) {
        let after = channel.recv(&Attachment::builder(&taker.device));
        assert!(
            matches!(after, Err(ShareError::Channel(ChannelError::Broken))),
            "{error}, then {after:?}"
        );
    }
    drop(channel);
    let heard = std::iter::from_fn(|| peer.hear()).last();
    let told = !matches!(error, ShareError::Channel(_) | ShareError::Refused { .. });
    if told {
        let (kind, reason, handles) = heard.expect("a refusal");
        assert!(handles.is_empty());
        assert_eq!((kind, reason[0]), (VERDICT, 1));
        assert_eq!(String::from_utf8_lossy(&reason[1..]), error.to_string());
    }
    error
}

/// Returns the taker's error for what a peer sends after a description of `granules` granules.
fn take_after(granules: u64, said: impl FnOnce(&mut Raw, &Device)) -> ShareError {
    take_from(|peer, device| {
        let told = AdviceRecord::of(device.uuid(), G, granules);
        assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        said(peer, device);
    })
}

#[track_caller]
fn malformed(error: &ShareError, expected: &str) {
    let ShareError::Channel(ChannelError::Malformed(what)) = error else {
        panic!("expected {expected}: {error:?}");
    };
    assert!(what.contains(expected), "{what} should be {expected}");
}

#[track_caller]
fn closed(error: &ShareError) {
    let right = matches!(error, ShareError::Channel(ChannelError::Closed));
    assert!(right, "{error:?}");
}

#[track_caller]
fn timed_out(error: &ShareError) {
    let right = matches!(error, ShareError::Channel(ChannelError::TimedOut(SHORT)));
    assert!(right, "{error:?}");
}

#[test]
fn heads_that_lie() {
    type Lie = fn(&mut Head);
    let lies: [(&str, Lie); 11] = [
        ("not one of this library", |head| head.magic = *b"http"),
        ("of another version", |head| head.version = 2),
        ("out of order", |head| head.serial = 1),
        ("out of order", |head| head.serial = u32::MAX),
        ("shorter or longer", |head| head.length += 1),
        ("shorter or longer", |head| head.length = u32::MAX),
        ("without the descriptors", |head| head.handles = 1),
        ("neither the last of a message", |head| head.more = 2),
        ("not full itself", |head| head.more = 1),
        ("of an unknown kind", |head| head.kind = 5),
        ("unexpected at this point", |head| head.kind = HANDLES),
    ];
    leaves_nothing_open(|| {
        for (expected, lie) in lies {
            let error = take_from(|peer, device| {
                let body = AdviceRecord::of(device.uuid(), G, 1).bytes();
                let mut head = peer.head(DESCRIPTION, &body, 0);
                lie(&mut head);
                assert!(peer.frame(head, &body, &[]));
            });
            malformed(&error, expected);
        }
    });
}

// I-62
#[test]
fn frames_that_are_short_long_twice_or_mixed_up() {
    leaves_nothing_open(|| {
        let error = take_from(|peer, _| assert!(peer.send(b"cvmm", &[])));
        malformed(&error, "shorter than its head");
        let error = take_from(|peer, _| assert!(peer.send(&[0; MOST_BODY + 21], &[])));
        assert!(matches!(
            error,
            ShareError::Channel(ChannelError::TooLarge { .. })
        ));
        // An empty message looks like the end of the stream.
        closed(&take_from(|peer, device| {
            let memory = handle(device, G);
            assert!(peer.send(&[], &[memory.as_fd()]));
        }));
        let error = take_after(1, |peer, device| {
            let memory = handle(device, G);
            let head = peer.head(HANDLES, &[], 1);
            let again = Head { serial: 0, ..head };
            assert!(peer.frame(again, &[], &[memory.as_fd()]));
        });
        malformed(&error, "out of order");
        let error = take_after(1, |peer, device| {
            let told = AdviceRecord::of(device.uuid(), G, 1);
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        });
        malformed(&error, "unexpected at this point");
        let error = take_from(|peer, _| {
            let body = [0; MOST_BODY];
            let head = peer.head(DESCRIPTION, &body, 0);
            assert!(peer.frame(Head { more: 1, ..head }, &body, &[]));
            assert!(peer.yes());
        });
        malformed(&error, "interleaved with another");
    });
}

// I-69
#[test]
fn descriptors_where_none_belong() {
    leaves_nothing_open(|| {
        let error = take_from(|peer, device| {
            let body = AdviceRecord::of(device.uuid(), G, 1).bytes();
            let memory = handle(device, G);
            assert!(peer.say(DESCRIPTION, &body, &[memory.as_fd()]));
        });
        malformed(&error, "where none belong");
        // The message announces zero and two handles but carries one.
        for said in [0, 2] {
            let error = take_after(2, |peer, device| {
                let memory = handle(device, G);
                let head = Head {
                    handles: said,
                    ..peer.head(HANDLES, &[], 1)
                };
                assert!(peer.frame(head, &[], &[memory.as_fd()]));
            });
            malformed(&error, "without the descriptors that its head announces");
        }
        let error = take_after(1, |peer, device| {
            let memory = handle(device, G);
            assert!(peer.say(VERDICT, &[0], &[memory.as_fd()]));
        });
        malformed(&error, "where none belong");
    });
}

#[test]
fn messages_without_end() {
    leaves_nothing_open(|| {
        let taker = common::clean(common::model());
        let how = Attachment::builder(&taker.device);
        // As fast as possible, until the body exceeds any description.
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(PROMPT);
        let body = [0; MOST_BODY];
        let talk = thread::spawn(move || {
            let more = |peer: &Raw| Head {
                more: 1,
                ..peer.head(DESCRIPTION, &body, 0)
            };
            while peer.frame(more(&peer), &body, &[]) {}
        });
        let error = channel.recv(&how).unwrap_err();
        assert!(
            matches!(error, ShareError::Channel(ChannelError::TooLarge { .. })),
            "{error}"
        );
        drop(channel);
        talk.join().unwrap();
        // Slowly, with each frame well within the total time.
        let (mut channel, mut peer) = Raw::pair();
        let begun = Instant::now();
        let talk = thread::spawn(move || {
            let more = |peer: &Raw| Head {
                more: 1,
                ..peer.head(DESCRIPTION, &body, 0)
            };
            while peer.frame(more(&peer), &body, &[]) {
                thread::sleep(SHORT / 6);
            }
        });
        timed_out(&channel.recv(&how).unwrap_err());
        assert!(begun.elapsed() < PROMPT);
        drop(channel);
        talk.join().unwrap();
    });
}

#[test]
fn handles_that_come_one_by_one_come_in_time_or_not_at_all() {
    leaves_nothing_open(|| {
        let (giver, taker) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (mut channel, mut peer) = Raw::pair();
        let told = AdviceRecord::of(giver.device.uuid(), G, 300);
        let device = giver.device.clone();
        let talk = thread::spawn(move || {
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
            let memory = handle(&device, G);
            while peer.hear().is_some() && peer.say(HANDLES, &[], &[memory.as_fd()]) {
                thread::sleep(SHORT / 12);
            }
        });
        let how = Attachment::builder(&taker.device);
        timed_out(&channel.recv(&how).unwrap_err());
        drop(channel);
        talk.join().unwrap();
    });
}

/// All messages are there already, so the channel never waits; the timeout applies all the same.
#[test]
fn a_peer_that_is_always_ready_has_no_more_time_than_others() {
    const MOMENT: Duration = Duration::from_micros(20);
    leaves_nothing_open(|| {
        let (giver, taker) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(MOMENT);
        let told = AdviceRecord::of(giver.device.uuid(), G, 100);
        assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        let memory = handle(&giver.device, G);
        (0..100).for_each(|_| assert!(peer.say(HANDLES, &[], &[memory.as_fd()])));
        let error = channel
            .recv(&Attachment::builder(&taker.device))
            .unwrap_err();
        let right = matches!(error, ShareError::Channel(ChannelError::TimedOut(MOMENT)));
        assert!(right, "{error:?}");
        drop((channel, peer, memory));
        // A timeout of zero does not receive messages that are already there either.
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(Duration::ZERO);
        assert!(peer.say(VERDICT, b"\x01no", &[]));
        let error = channel
            .recv(&Attachment::builder(&taker.device))
            .unwrap_err();
        let right = matches!(
            error,
            ShareError::Channel(ChannelError::TimedOut(Duration::ZERO))
        );
        assert!(right, "{error:?}");
    });
}

#[test]
fn handles_of_something_else() {
    leaves_nothing_open(|| {
        let (reader, _writer) = std::io::pipe().unwrap();
        let unsealed = memfd_create("cuvmm-1-0", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&unsealed, G).unwrap();
        let (socket, _other) = Raw::pair();
        drop(socket);
        let others: [OwnedFd; 4] = [
            std::fs::File::open("/dev/null").unwrap().into(),
            reader.into(),
            unsealed,
            _other.socket,
        ];
        for other in &others {
            // Behind a valid handle.
            let error = take_after(2, |peer, device| {
                let good = handle(device, G);
                assert!(peer.say(HANDLES, &[], &[good.as_fd(), other.as_fd()]));
            });
            let ShareError::Memory(MemoryError::Range {
                offset: G,
                size: G,
                cause,
            }) = error
            else {
                panic!("{error:?}");
            };
            assert!(matches!(cause, CallError::Driver(_)), "{cause}");
        }
        // Memory larger and smaller than described, which shows when it is mapped.
        for (size, said) in [(2 * G, G), (G, 2 * G), (G, 1 << 40)] {
            let error = take_from(|peer, device| {
                let mut told = AdviceRecord::of(device.uuid(), G, 1);
                told.size = said;
                told.extents[0].1 = said;
                assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
                let memory = handle(device, size);
                assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
            });
            let right = matches!(
                error,
                ShareError::Memory(MemoryError::Range { offset: 0, size, .. }) if size == said
            );
            assert!(right, "{size} described as {said}: {error:?}");
        }
    });
}

#[test]
fn memory_of_another_place() {
    leaves_nothing_open(|| {
        // On an unknown device.
        let error = take_from(|peer, _| {
            let told = AdviceRecord::of([9; 16], G, 1);
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        });
        assert!(matches!(
            error,
            ShareError::NoSuchDevice(uuid) if uuid == [9; 16]
        ));
        // Described as host memory.
        let error = take_from(|peer, device| {
            let mut told = AdviceRecord::of(device.uuid(), G, 1);
            told.places[0] = (LocationKind::HOST_NUMA.0, 0, [0; 16]);
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
            let memory = handle(device, G);
            assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
        });
        let elsewhere = matches!(
            error,
            ShareError::Memory(MemoryError::Elsewhere { offset: 0, found, .. })
                if found.kind == LocationKind::DEVICE
        );
        assert!(elsewhere, "{error:?}");
        // Described as memory of this device, but on the host.
        let error = take_after(1, |peer, device| {
            let host = Physical::builder(device, G)
                .on_host_numa(1)
                .shareable(FD)
                .create()
                .unwrap();
            let Exported::Fd(memory) = host.export(FD).unwrap() else {
                panic!("a descriptor")
            };
            assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
        });
        let elsewhere = matches!(
            error,
            ShareError::Memory(MemoryError::Elsewhere { offset: 0, found, .. })
                if found.kind == LocationKind::HOST_NUMA
        );
        assert!(elsewhere, "{error:?}");
    });
}

#[test]
fn too_many_handles_and_none() {
    leaves_nothing_open(|| {
        let error = take_after(2, |peer, device| {
            let handles = [handle(device, G), handle(device, G), handle(device, G)];
            assert!(peer.say(HANDLES, &[], &lend(&handles)));
        });
        let right = matches!(
            error,
            ShareError::Argument(ArgumentError::TooLarge {
                value: 3,
                most: 2,
                ..
            })
        );
        assert!(right, "{error:?}");
        let error = take_after(1, |peer, _| assert!(peer.say(HANDLES, &[], &[])));
        malformed(&error, "without handles");
        let error = take_after(1, |peer, _| assert!(peer.say(HANDLES, &[0; 63], &[])));
        malformed(&error, "without handles, or with more");
        let error = take_after(1, |peer, device| {
            let memory = handle(device, G);
            assert!(peer.say(HANDLES, &[0; 64], &[memory.as_fd()]));
        });
        malformed(&error, "without handles, or with more");
        let error = take_after(1, |peer, _| assert!(peer.say(HANDLES, &[0; 64], &[])));
        let right = matches!(
            error,
            ShareError::Memory(MemoryError::NotShareable {
                handle_type: HandleTypes::FABRIC,
                shareable: HandleTypes::POSIX_FD,
                ..
            })
        );
        assert!(right, "{error:?}");
        let error = take_after(1, |peer, _| {
            let body = [0; MOST_BODY];
            let head = peer.head(HANDLES, &body, 0);
            assert!(peer.frame(Head { more: 1, ..head }, &body, &[]));
        });
        let right = matches!(error, ShareError::Channel(ChannelError::TooLarge { .. }));
        assert!(right, "{error:?}");
    });
}

/// An importer cannot tell that two handles refer to the same memory: it imports the memory twice
/// and releases it twice. A message may carry as many handles as fit.
#[test]
fn the_same_memory_twice_and_as_many_as_fit() {
    leaves_nothing_open(|| {
        let (giver, taker) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(PROMPT);
        let told = AdviceRecord::of(giver.device.uuid(), G, 253 + 7);
        assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        let memory = handle(&giver.device, G);
        assert!(peer.say(HANDLES, &[], &[memory.as_fd(); 253]));
        assert!(peer.say(HANDLES, &[], &[memory.as_fd(); 7]));
        let taken = channel.recv(&Attachment::builder(&taker.device)).unwrap();
        assert_eq!(taken.held(), 260 * G);
        assert_eq!(taken.extents().len(), 260);
        taken.close().unwrap();
    });
}

#[test]
fn descriptions_that_are_refused_before_a_handle_is_asked_for() {
    leaves_nothing_open(|| {
        let error = take_from(|peer, _| assert!(peer.say(DESCRIPTION, b"", &[])));
        let right = matches!(
            error,
            ShareError::Description(DescriptionError::Length { .. })
        );
        assert!(right, "{error:?}");
        let error = take_from(|peer, device| {
            let mut told = AdviceRecord::of(device.uuid(), 4096, 1);
            told.size = G;
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        });
        let right = matches!(
            error,
            ShareError::Argument(ArgumentError::Misaligned {
                what: "bytes of an extent",
                value: 4096,
                multiple: G
            })
        );
        assert!(right, "{error:?}");
    });
}

#[test]
fn more_addresses_than_there_are() {
    leaves_nothing_open(|| {
        for size in [1 << 62, u64::MAX - 1, u64::MAX] {
            let error = take_from(|peer, device| {
                let mut told = AdviceRecord::of(device.uuid(), G, 1);
                told.size = size;
                assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
                let memory = handle(device, G);
                assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
            });
            let right = match size.is_multiple_of(G) {
                true => matches!(
                    error,
                    ShareError::Memory(MemoryError::Range { offset: 0, size: told, .. })
                        if told == size
                ),
                false => matches!(
                    error,
                    ShareError::Argument(ArgumentError::Misaligned { value, multiple: G, .. })
                        if value == size
                ),
            };
            assert!(right, "{size}: {error:?}");
        }
    });
}

#[test]
fn givers_that_give_up_or_say_yes_to_nothing() {
    leaves_nothing_open(|| {
        for error in [
            take_from(|peer, _| assert!(peer.say(VERDICT, b"\x01not today", &[]))),
            take_after(1, |peer, _| {
                assert!(peer.say(VERDICT, b"\x01not today", &[]));
            }),
            take_after(2, |peer, device| {
                let memory = handle(device, G);
                assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
                assert!(peer.say(VERDICT, b"\x01not today", &[]));
            }),
        ] {
            let right = matches!(&error, ShareError::Refused(reason) if reason == "not today");
            assert!(right, "{error:?}");
        }
        malformed(
            &take_after(1, |peer, _| assert!(peer.yes())),
            "an acceptance of nothing",
        );
        for neither in [&[] as &[u8], &[2], &[0, 0]] {
            let error = take_after(1, |peer, _| assert!(peer.say(VERDICT, neither, &[])));
            malformed(&error, "neither an acceptance nor a refusal");
        }
        let error = take_after(1, |peer, _| {
            assert!(peer.say(VERDICT, &[1; 5000], &[]));
        });
        assert!(matches!(error, ShareError::Refused { .. }), "{error:?}");
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn silence_and_closing_at_each_step_of_a_taking() {
    let half = |peer: &mut Raw, device: &Device| {
        let memory = handle(device, G);
        assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
    };
    leaves_nothing_open(|| {
        timed_out(&take_from(|_, _| {}));
        timed_out(&take_after(2, |_, _| {}));
        timed_out(&take_after(2, half));
        let close = |peer: &mut Raw| {
            rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both).unwrap();
        };
        closed(&take_from(|peer, _| close(peer)));
        closed(&take_after(2, |peer, _| close(peer)));
        closed(&take_after(2, |peer, device| {
            half(peer, device);
            close(peer);
        }));
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_peer_that_does_not_hear_that_all_was_mapped() {
    leaves_nothing_open(|| {
        let (giver, taker) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(PROMPT);
        let told = AdviceRecord::of(giver.device.uuid(), G, 1);
        let memory = handle(&giver.device, G);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
                assert_eq!(peer.hear().expect("an answer").0, VERDICT);
                rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Read).unwrap();
                assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
            });
            closed(
                &channel
                    .recv(&Attachment::builder(&taker.device))
                    .unwrap_err(),
            );
        });
        // No work can use what was not attached, and waiting would break a capture.
        assert_eq!(taker.device.calls().count(Call::CtxSynchronize), 0);
    });
}

/// Returns the error of a giver of forty granules for what a peer sends, and what that peer
/// received by then.
fn give_to(said: impl FnOnce(&mut Raw)) -> ShareError {
    let giver = common::clean(common::model());
    let region = shareable_region(&giver, 40);
    let before = giver.machine.snapshot();
    let offer = Offer::region(&region, 0..40 * G).unwrap();
    let (mut channel, mut peer) = Raw::pair();
    said(&mut peer);
    let begun = Instant::now();
    let error = channel.send(&offer).unwrap_err();
    assert!(begun.elapsed() < PROMPT, "{error}");
    if matches!(error, ShareError::Channel(_)) {
        assert!(matches!(
            channel.send(&offer),
            Err(ShareError::Channel(ChannelError::Broken))
        ));
    }
    drop((channel, peer, offer));
    assert_eq!(giver.machine.snapshot(), before, "{error}");
    error
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn takers_that_are_wrong_silent_or_gone() {
    leaves_nothing_open(|| {
        let wrong = |error: ShareError, expected: &str| {
            let ShareError::Channel(ChannelError::Malformed(what)) = error else {
                panic!("expected {expected}: {error:?}");
            };
            assert!(what.contains(expected), "{what} should be {expected}");
        };
        for yes in 0..3 {
            let after = |said: &dyn Fn(&mut Raw)| {
                give_to(|peer| {
                    (0..yes).for_each(|_| assert!(peer.yes()));
                    said(peer);
                })
            };
            let error = after(&|_| {});
            let right = matches!(error, ShareError::Channel(ChannelError::TimedOut(SHORT)));
            assert!(right, "{yes}: {error:?}");
            let error = after(&|peer| {
                rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write).unwrap();
            });
            let right = matches!(error, ShareError::Channel(ChannelError::Closed));
            assert!(right, "{yes}: {error:?}");
            let error = after(&|peer| assert!(peer.say(VERDICT, b"\x01no \xff", &[])));
            let right = matches!(&error, ShareError::Refused(reason) if reason == "no \u{fffd}");
            assert!(right, "{yes}: {error:?}");
            for neither in [&[] as &[u8], &[7], &[0, 1]] {
                let error = after(&|peer| assert!(peer.say(VERDICT, neither, &[])));
                wrong(error, "neither an acceptance nor a refusal");
            }
            wrong(
                after(&|peer| assert!(peer.say(TEXT, b"\"List\"", &[]))),
                "unexpected at this point",
            );
            wrong(
                after(&|peer| {
                    let null = std::fs::File::open("/dev/null").unwrap();
                    assert!(peer.say(VERDICT, &[0], &[null.as_fd()]));
                }),
                "where none belong",
            );
        }
    });
}

/// A peer that does not read: sending does not wait forever.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_description_that_nobody_reads() {
    leaves_nothing_open(|| {
        let giver = common::clean(common::model());
        let region = shareable_region(&giver, 16 << 10);
        let offer = Offer::region(&region, 0..region.size()).unwrap();
        assert!(offer.description().to_bytes().len() > 5 * MOST_BODY);
        let (mut channel, _peer) = Raw::pair();
        let error = channel.send(&offer).unwrap_err();
        let right = matches!(error, ShareError::Channel(ChannelError::TimedOut(SHORT)));
        assert!(right, "{error:?}");
    });
}

/// Returns a reader's error for what a publisher answers.
fn attach_from(said: impl FnOnce(&mut Raw, &Device)) -> ShareError {
    let (writer, reader) = (
        common::clean(common::model()),
        common::clean(common::model()),
    );
    let (channel, mut peer) = Raw::pair();
    let mut subscriber = Subscriber::from_channel(channel);
    said(&mut peer, &writer.device);
    let begun = Instant::now();
    let error = subscriber
        .attach("llama", &Attachment::builder(&reader.device))
        .unwrap_err();
    assert!(begun.elapsed() < PROMPT, "{error}");
    // No work can use what was not attached, and waiting would break a capture.
    assert_eq!(reader.device.calls().count(Call::CtxSynchronize), 0);
    error
}

#[test]
fn answers_that_are_none() {
    let deep = "[".repeat(60_000);
    let deep_inside = format!(r#"{{"Published":{{"manifest":{{"other":{deep}"#);
    let nonsense = [
        "",
        "{",
        "null",
        "\u{0}",
        r#""Newest""#,
        r#"{"Published":{}}"#,
        r#"{"Published":{"publisher":1,"version":-1,"manifest":{"tensors":[]}}}"#,
        r#"{"Published":{"publisher":1,"version":1e400,"manifest":{"tensors":[]}}}"#,
        r#"{"Published":{"publisher":1,"version":1,"manifest":{"tensors":[{}]}}}"#,
        r#"{"Published":{"publisher":1,"publisher":1,"version":1,"manifest":{"tensors":[]}}}"#,
        r#"{"NotPublished":7}"#,
        r#""NotPublished" "NotPublished""#,
        // Answers to other requests.
        r#"{"Newest":null}"#,
        r#"{"Publications":[]}"#,
        &deep,
        &deep_inside,
    ];
    leaves_nothing_open(|| {
        for answer in nonsense {
            let error = attach_from(|peer, _| {
                assert!(peer.say(TEXT, answer.as_bytes(), &[]));
            });
            let right = matches!(error, ShareError::Channel(ChannelError::Malformed { .. }));
            assert!(right, "{answer:.40}: {error:?}");
        }
        let error = attach_from(|peer, _| assert!(peer.say(TEXT, b"\xff\xfe", &[])));
        let right = matches!(error, ShareError::Channel(ChannelError::Malformed { .. }));
        assert!(right, "{error:?}");
        let error = attach_from(|peer, device| {
            let told = AdviceRecord::of(device.uuid(), G, 1);
            assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
        });
        let right = matches!(
            error,
            ShareError::Channel(ChannelError::Malformed("unexpected at this point"))
        );
        assert!(right, "{error:?}");
        let error = attach_from(|_, _| {});
        let right = matches!(error, ShareError::Channel(ChannelError::TimedOut(SHORT)));
        assert!(right, "{error:?}");
    });
}

#[test]
fn an_answer_that_makes_no_sense_ends_the_connection() {
    leaves_nothing_open(|| {
        let (channel, mut peer) = Raw::pair();
        let mut subscriber = Subscriber::from_channel(channel);
        assert!(peer.say(TEXT, br#"{"Newest":3}"#, &[]));
        assert!(peer.say(TEXT, br#"{"Publications":[]}"#, &[]));
        assert!(matches!(
            subscriber.list(),
            Err(ShareError::Channel(ChannelError::Malformed { .. }))
        ));
        assert!(
            matches!(
                subscriber.list(),
                Err(ShareError::Channel(ChannelError::Broken))
            ),
            "what comes next might be the answer to the question before"
        );
    });
}

#[test]
fn manifests_that_lie() {
    let tensor = |name: &str, offset: u64, size: u64| {
        format!(r#"{{"name":"{name}","dtype":"U8","shape":[1],"offset":{offset},"size":{size}}}"#)
    };
    let outside = [(G, 1), (0, G + 1), (u64::MAX, 2), (1, u64::MAX)];
    leaves_nothing_open(|| {
        let publish = |tensors: String| {
            attach_from(|peer, device| {
                let published = format!(
                    r#"{{"Published":{{"publisher":1,"version":1,"manifest":{{"tensors":[{tensors}]}}}}}}"#
                );
                assert!(peer.say(TEXT, published.as_bytes(), &[]));
                let told = AdviceRecord::of(device.uuid(), G, 1);
                assert!(peer.say(DESCRIPTION, &told.bytes(), &[]));
                let memory = handle(device, G);
                assert!(peer.say(HANDLES, &[], &[memory.as_fd()]));
            })
        };
        for (at, many) in outside {
            let error = publish(tensor("a", at, many));
            let right = matches!(
                &error,
                ShareError::Description(DescriptionError::Tensor { name, offset, size })
                    if name == "a" && (*offset, *size) == (at, many)
            );
            assert!(right, "{error:?}");
        }
        let error = publish([tensor("a", 0, 1), tensor("a", 1, 1)].join(","));
        let right = matches!(
            &error,
            ShareError::Description(DescriptionError::NameTaken(name)) if name == "a"
        );
        assert!(right, "{error:?}");
    });
}

#[test]
fn an_answer_larger_than_any() {
    leaves_nothing_open(|| {
        let (mut channel, mut peer) = Raw::pair();
        channel.set_timeout(Duration::from_secs(60));
        let talk = thread::spawn(move || {
            let body = [b' '; MOST_BODY];
            let more = |peer: &Raw| Head {
                more: 1,
                ..peer.head(TEXT, &body, 0)
            };
            while peer.frame(more(&peer), &body, &[]) {}
        });
        let mut subscriber = Subscriber::from_channel(channel);
        let error = subscriber.list().unwrap_err();
        let right = matches!(
            error,
            ShareError::Channel(ChannelError::TooLarge { most }) if most < 4 << 20
        );
        assert!(right, "{error:?}");
        drop(subscriber);
        talk.join().unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(400)))]

    /// A peer that sends anything in any order. `tools/fuzz/fuzz_targets/channel.rs` extends this test.
    #[test]
    fn a_peer_that_says_anything(script in proptest::collection::vec(0u8..24, 0..40)) {
        leaves_nothing_open(|| {
            let (giver, taker) = (common::clean(common::model()), common::clean(common::model()));
            let mine = shareable_region(&giver, 3);
            let offer = Offer::region(&mine, 0..3 * G).unwrap();
            let (told, handles) = offer.parcel().unwrap().into_parts();
            let handles = handles.into_iter().map(|handle| match handle {
                Exported::Fd(fd) => fd,
                other => panic!("{other:?}"),
            });
            let words = Words::new(told.to_bytes(), handles.collect());
            let how = Attachment::builder(&taker.device);
            let begun = Instant::now();
            // Messages that were not received wait in the sockets and are closed with them.
            let hears = |listens: &dyn Fn(Channel)| {
                let (channel, mut peer) = Raw::pair();
                words.speak(&mut peer, &script);
                listens(channel);
            };
            hears(&|mut channel| drop(channel.recv(&how)));
            hears(&|mut channel| drop(channel.send(&offer)));
            hears(&|channel| drop(Subscriber::from_channel(channel).attach("llama", &how)));
            prop_assert!(begun.elapsed() < PROMPT);
            Ok(())
        })?;
    }
}
