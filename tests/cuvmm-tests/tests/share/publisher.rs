//! Publishers with readers that are wrong, silent, many or gone, and the reverse.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, Rig, shareable_region};
use crate::share_support::{
    DESCRIPTION, Head, MOST_BODY, PROMPT, Raw, TEXT, VERDICT, drop_in_child, ended, fork,
    in_a_child, leaves_nothing_open, open_files,
};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, ChannelError, ShareError};
use cuvmm::share::{Listener, Manifest, Publication, Publisher, Subscriber};
use cuvmm::{Attachment, Channel, CloseRefusal, Offer, Region, Stream};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

type Host = Rig<HostMemory>;

/// Creates a region of two extents with a text at its start.
fn published(rig: &Host, text: &[u8]) -> Region {
    let region = shareable_region(rig, 2);
    let stream = Stream::legacy(&rig.device);
    region.write(&stream, 0, text).unwrap();
    region
}

fn text<const N: usize>(rig: &Host, memory: &Attachment) -> [u8; N] {
    let mut bytes = [0; N];
    memory
        .read(&Stream::legacy(&rig.device), 0, &mut bytes)
        .unwrap();
    bytes
}

/// Creates a publisher with one publication, and returns its folder and path.
fn publisher(rig: &Host) -> (tempfile::TempDir, PathBuf, Publisher) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let publisher = Publisher::bind(&path).unwrap();
    publisher
        .publish("llama", Manifest::default(), published(rig, b"first"))
        .unwrap();
    (folder, path, publisher)
}

fn attach(rig: &Host, subscriber: &mut Subscriber) -> Publication {
    subscriber
        .attach("llama", &Attachment::builder(&rig.device))
        .unwrap()
}

const ATTACH: &[u8] = br#"{"Attach":{"name":"llama"}}"#;

fn watch(millis: u64) -> String {
    format!(r#"{{"Watch":{{"name":"llama","publisher":0,"version":0,"millis":{millis}}}}}"#)
}

#[test]
fn a_publication_that_cannot_be_closed_is_handed_back() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::host(), common::clean(common::host()));
        let (_folder, path, _publisher) = publisher(&writer);
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let mut read = attach(&reader, &mut subscriber);
        let failed = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        for call in [Call::CtxSynchronize, Call::MemUnmap] {
            reader.faults.arm(Fault::all(failed).of(call));
            let refused = read.close().unwrap_err();
            reader.faults.disarm();
            assert!(matches!(refused.reason, CloseRefusal::Call(_)), "{refused}");
            read = refused.owner;
            assert_eq!((read.name(), read.version()), ("llama", 1));
            assert!(read.memory().held() > 0);
        }
        read.close().unwrap();
        assert_eq!(reader.device.drop_failures(), 0);
    });
}

#[test]
fn readers_that_are_wrong_are_let_go_and_others_are_served() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let (_folder, path, _publisher) = publisher(&writer);
        let before = open_files().len();
        let wrong: [&dyn Fn(&mut Raw); 9] = [
            &|peer| assert!(peer.send(b"GET / HTTP/1.1", &[])),
            &|peer| assert!(peer.say(TEXT, b"\"Dance\"", &[])),
            &|peer| assert!(peer.say(TEXT, b"[[[[[[[[[[[[[[[[[[[[[", &[])),
            &|peer| assert!(peer.say(TEXT, &[b' '; 4097], &[])),
            &|peer| assert!(peer.say(DESCRIPTION, ATTACH, &[])),
            &|peer| assert!(peer.yes()),
            &|peer| {
                let head = Head {
                    more: 1,
                    ..peer.head(TEXT, &[0; MOST_BODY], 0)
                };
                assert!(peer.frame(head, &[0; MOST_BODY], &[]));
            },
            // An invalid verdict on the description.
            &|peer| {
                assert!(peer.say(TEXT, ATTACH, &[]));
                assert!(peer.say(TEXT, ATTACH, &[]));
            },
            // A reader that disconnects.
            &|peer| {
                assert!(peer.say(TEXT, ATTACH, &[]));
                rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both).unwrap();
            },
        ];
        for wrong in wrong {
            let mut peer = Raw::connect(&path);
            wrong(&mut peer);
            while peer.hear().is_some() {}
        }
        // A refusal is none of these errors: the connection stays usable.
        let mut peer = Raw::connect(&path);
        for _ in 0..3 {
            assert!(peer.say(TEXT, ATTACH, &[]));
            assert_eq!(peer.hear().unwrap().0, TEXT);
            assert_eq!(peer.hear().unwrap().0, DESCRIPTION);
            assert!(peer.say(VERDICT, b"\x01no", &[]));
        }
        let mut subscriber = Subscriber::connect(&path).unwrap();
        assert!(matches!(
            subscriber.attach(&"x".repeat(9000), &Attachment::builder(&reader.device)),
            Err(ShareError::NotFound { .. })
        ));
        let read = attach(&reader, &mut subscriber);
        assert_eq!(&text(&reader, read.memory()), b"first");
        drop((read, peer, subscriber));
        let begun = Instant::now();
        while open_files().len() > before && begun.elapsed() < PROMPT {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(
            open_files().len(),
            before,
            "descriptors of the readers that disconnected"
        );
    });
}

/// Ending a publisher waits for no reader, silent or in the middle of an exchange.
#[test]
fn a_publisher_ends_at_once_whoever_is_silent() {
    let silent: [&dyn Fn(&mut Raw); 6] = [
        &|_| {},
        &|peer| assert!(peer.say(TEXT, watch(u64::MAX).as_bytes(), &[])),
        &|peer| {
            let head = Head {
                more: 1,
                ..peer.head(TEXT, &[0; MOST_BODY], 0)
            };
            assert!(peer.frame(head, &[b' '; MOST_BODY], &[]));
        },
        // A reader that does not answer the description, or the handles.
        &|peer| assert!(peer.say(TEXT, ATTACH, &[])),
        &|peer| {
            assert!(peer.say(TEXT, ATTACH, &[]));
            assert!(peer.yes());
        },
        // A reader that sends requests and reads nothing.
        &|peer| {
            rustix::io::ioctl_fionbio(&peer.socket, true).unwrap();
            while peer.say(TEXT, b"\"List\"", &[]) {
                thread::yield_now();
            }
        },
    ];
    leaves_nothing_open(|| {
        for (index, silent) in silent.iter().enumerate() {
            let writer = common::clean(common::host());
            let (folder, path, publisher) = publisher(&writer);
            let mut peer = Raw::connect(&path);
            silent(&mut peer);
            thread::sleep(Duration::from_millis(20));
            let begun = Instant::now();
            drop(publisher);
            let took = begun.elapsed();
            assert!(took < PROMPT, "case {index}: {took:?}");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
            while peer.hear().is_some() {}
        }
    });
}

#[test]
fn waiting_for_ever_ends_with_an_edition_a_withdrawal_or_the_publisher() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let (_folder, path, publisher) = publisher(&writer);
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let first = attach(&reader, &mut subscriber);
        let mut wait = |meanwhile: &mut dyn FnMut()| {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| subscriber.wait_for_newer(&first, Duration::MAX));
                thread::sleep(Duration::from_millis(20));
                assert!(!waiting.is_finished());
                let begun = Instant::now();
                meanwhile();
                let woken = waiting.join().unwrap();
                assert!(begun.elapsed() < PROMPT);
                woken
            })
        };
        let newer = wait(&mut || {
            let version = publisher.publish("llama", Manifest::default(), published(&writer, b"b"));
            assert_eq!(version.unwrap(), 2);
        });
        assert_eq!(newer.unwrap(), Some(2));
        // The reader's version is not the newest, so the call returns at once.
        let begun = Instant::now();
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let newer = subscriber.wait_for_newer(&first, Duration::MAX).unwrap();
        assert_eq!(newer, Some(2));
        assert!(begun.elapsed() < PROMPT);
        let second = attach(&reader, &mut subscriber);
        let mut wait = |meanwhile: &mut dyn FnMut()| {
            thread::scope(|scope| {
                let waiting = scope.spawn(|| subscriber.wait_for_newer(&second, Duration::MAX));
                thread::sleep(Duration::from_millis(20));
                assert!(!waiting.is_finished());
                let begun = Instant::now();
                meanwhile();
                let woken = waiting.join().unwrap();
                assert!(begun.elapsed() < PROMPT);
                woken
            })
        };
        let withdrawn = wait(&mut || assert!(publisher.withdraw("llama")));
        let right = matches!(withdrawn, Err(ShareError::NotFound { .. }));
        assert!(right, "{withdrawn:?}");
        assert!(!publisher.withdraw("llama"));
        // Version numbers continue, so that a new version is never mistaken for an old one.
        let again = publisher.publish("llama", Manifest::default(), published(&writer, b"c"));
        assert_eq!(again.unwrap(), 3);
        let third = attach(&reader, &mut subscriber);
        let mut publisher = Some(publisher);
        let gone = thread::scope(|scope| {
            let waiting = scope.spawn(|| subscriber.wait_for_newer(&third, Duration::MAX));
            thread::sleep(Duration::from_millis(20));
            drop(publisher.take());
            waiting.join().unwrap()
        });
        let right = matches!(gone, Err(ShareError::Channel(ChannelError::Closed)));
        assert!(right, "{gone:?}");
        assert_eq!(&text(&reader, first.memory()), b"first");
        assert_eq!(&text(&reader, second.memory()), b"b");
        assert_eq!(&text(&reader, third.memory()), b"c");
        drop((first, second, third));
    });
}

/// A later publisher at the same path has other versions, whatever their numbers.
#[test]
fn another_publisher_has_other_versions() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let (_folder, path, first) = publisher(&writer);
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let old = attach(&reader, &mut subscriber);
        drop((first, subscriber));
        let second = Publisher::bind(&path).unwrap();
        let version = second.publish("llama", Manifest::default(), published(&writer, b"other"));
        assert_eq!(version.unwrap(), old.version());
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let newer = subscriber.wait_for_newer(&old, Duration::MAX).unwrap();
        assert_eq!(newer, Some(1));
        assert_eq!(
            &text(&reader, attach(&reader, &mut subscriber).memory()),
            b"other"
        );
        assert_eq!(&text(&reader, old.memory()), b"first");
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_manifest_that_nobody_would_read_is_refused() {
    leaves_nothing_open(|| {
        let writer = common::clean(common::host());
        let (_folder, _path, publisher) = publisher(&writer);
        let mut manifest = Manifest::default();
        manifest
            .metadata
            .insert("notes".to_owned(), "x".repeat(64 << 20));
        let refused = publisher
            .publish("large", manifest, published(&writer, b"x"))
            .unwrap_err();
        let right = matches!(
            refused.reason,
            ShareError::Argument(ArgumentError::TooLarge { what: "bytes of a manifest", value, most })
                if value > 64 << 20 && most < 64 << 20
        );
        assert!(right, "{refused:?}");
        let stream = Stream::legacy(&writer.device);
        let memory = refused.owner;
        memory.write(&stream, 0, b"still writable").unwrap();
    });
}

/// With more connections than a publisher serves, the served ones continue, the others are refused,
/// and nothing is leaked.
#[test]
fn idle_connections_are_bounded() {
    in_a_child(|| {
        let limit = getrlimit(Resource::Nofile);
        let enough = limit.maximum.unwrap_or(u64::MAX).min(4096);
        let raised = Rlimit {
            current: Some(enough),
            ..limit
        };
        setrlimit(Resource::Nofile, raised).unwrap();
        // Each connection has a descriptor on either side.
        let many = (enough as usize - 100).min(2 * 1100) / 2;
        let writer = common::clean(common::host());
        let (_folder, path, publisher) = publisher(&writer);
        let mut served = Subscriber::connect(&path).unwrap();
        assert_eq!(served.list().unwrap().all, 1);
        let before = open_files().len();
        let mut idle: Vec<Raw> = (0..many).map(|_| Raw::connect(&path)).collect();
        assert_eq!(served.list().unwrap().all, 1);
        if many > 1024 {
            let mut last = idle.pop().unwrap();
            let (kind, why, _) = last.hear().unwrap();
            let why = String::from_utf8(why).unwrap();
            assert!(kind == TEXT && why.contains("connected already"), "{why}");
            assert!(last.hear().is_none(), "too many connections");
        }
        drop(idle);
        let begun = Instant::now();
        while open_files().len() > before && begun.elapsed() < PROMPT {
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(open_files().len(), before);
        let mut again = Subscriber::connect(&path).unwrap();
        assert_eq!(again.list().unwrap().all, 1);
        drop((served, again));
        let begun = Instant::now();
        drop(publisher);
        assert!(begun.elapsed() < PROMPT);
    });
}

#[test]
fn a_forked_child_ends_nothing_of_its_parent_s() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let (folder, path, publisher) = publisher(&writer);
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let read = attach(&reader, &mut subscriber);
        let listening = folder.path().join("listening");
        let listener = Listener::bind(&listening).unwrap();
        let (mut here, mut there) = Channel::pair().unwrap();
        let mine = published(&writer, b"mine");
        let offer = Offer::region(&mine, 0..2 * G).unwrap();
        let parcel = offer.parcel().unwrap();
        let child = fork(|| {
            drop_in_child(&publisher);
            drop_in_child(&subscriber);
            drop_in_child(&read);
            drop_in_child(&listener);
            drop_in_child(&here);
            drop_in_child(&there);
            drop_in_child(&offer);
            drop_in_child(&parcel);
            assert_eq!(writer.device.drop_failures(), 0);
            assert_eq!(reader.device.drop_failures(), 0);
        });
        assert_eq!(ended(child, PROMPT), Some(0));
        assert_eq!(&text(&reader, read.memory()), b"first");
        assert_eq!(subscriber.list().unwrap().all, 1);
        drop(Subscriber::connect(&path).unwrap());
        let one = Channel::connect(&listening).unwrap();
        drop((one, listener.accept(PROMPT).unwrap()));
        let how = Attachment::builder(&reader.device);
        thread::scope(|scope| {
            scope.spawn(|| here.send(&offer).unwrap());
            assert_eq!(&text(&reader, &there.recv(&how).unwrap()), b"mine");
        });
        assert_eq!(&text(&reader, &how.open(&parcel).unwrap()), b"mine");
        drop((publisher, subscriber, read, listener, offer, parcel, mine));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    });
}
