//! Publications that outlive their publishers, in one process here; `keeper_processes.rs` kills real
//! ones.
//!
//! Keeps I-116.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common;
use crate::common::{G, Rig, shareable_region};
use crate::share_support::{
    DESCRIPTION, HANDLES, Raw, SHORT, TEXT, drop_in_child, in_a_child, leaves_nothing_open, lend,
    open_files,
};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{CUresult, Call, Exported};
use cuvmm::error::{ChannelError, ShareError};
use cuvmm::share::{Keeper, Keeping, Manifest, Parcel, Publication, Publisher, Subscriber};
use cuvmm::{Attachment, Offer, Region, Stream};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

type Host = Rig<HostMemory>;

/// A folder with a keeper and a place for publishers.
struct Scene {
    folder: tempfile::TempDir,
    keeper: Keeper,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let keeper = Keeper::bind(folder.path().join("keeper"), None).unwrap();
        Self { folder, keeper }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a publisher with one publication.
    fn publisher(&self, rig: &Host, name: &str, text: &[u8]) -> Publisher {
        let publisher = Publisher::bind(self.path(name)).unwrap();
        publish(rig, &publisher, text);
        publisher
    }

    fn kept(&self) -> Vec<(String, u64, Keeping)> {
        let kept = self.keeper.list().into_iter();
        kept.map(|one| (one.name, one.version, one.keeping))
            .collect()
    }

    fn has(&self, version: u64) -> bool {
        self.kept() == [("llama".to_owned(), version, Keeping::Kept)]
    }
}

/// Publishes two extents with a text at their start.
fn publish(rig: &Host, publisher: &Publisher, text: &[u8]) -> u64 {
    let region = shareable_region(rig, 2);
    region.write(&Stream::legacy(&rig.device), 0, text).unwrap();
    publisher
        .publish("llama", Manifest::default(), region)
        .unwrap()
}

fn attach(rig: &Host, path: &Path) -> (Subscriber, Publication) {
    let mut subscriber = Subscriber::connect(path).unwrap();
    let how = Attachment::builder(&rig.device);
    let publication = subscriber.attach("llama", &how).unwrap();
    (subscriber, publication)
}

fn reads(rig: &Host, publication: &Publication, text: &[u8]) {
    let mut bytes = vec![0; text.len()];
    let stream = Stream::legacy(&rig.device);
    publication.memory().read(&stream, 0, &mut bytes).unwrap();
    assert_eq!(bytes, text);
    assert_eq!(publication.memory().held(), 2 * G);
}

#[test]
fn a_kept_publication_outlives_its_publisher() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let scene = Scene::new();
        let publisher = scene.publisher(&writer, "first", b"weights");
        assert_eq!(publisher.list()[0].keeping, Keeping::No);
        assert_eq!(publisher.keep("llama", scene.keeper.path()).unwrap(), 1);
        assert_eq!(publisher.list()[0].keeping, Keeping::Wanted);
        assert!(scene.has(1));
        let (mut early, before) = attach(&reader, publisher.path());
        drop(publisher);
        let refused = early.wait_for_newer(&before, Duration::ZERO);
        assert!(
            matches!(refused, Err(ShareError::Channel(ChannelError::Closed))),
            "{refused:?}"
        );
        let (mut late, after) = attach(&reader, scene.keeper.path());
        reads(&reader, &after, b"weights");
        assert_eq!((after.version(), after.manifest()), (1, before.manifest()));
        // The keeper has the same version as the publisher had.
        assert_eq!(late.wait_for_newer(&before, Duration::ZERO).unwrap(), None);
        assert!(late.release("llama").unwrap());
        assert!(!late.release("llama").unwrap() && scene.kept().is_empty());
        let again = late.attach("llama", &Attachment::builder(&reader.device));
        assert!(matches!(again, Err(ShareError::NotFound(_))), "{again:?}");
        // Readers go on, also when the keeper has ended.
        drop((scene, early, late));
        reads(&reader, &after, b"weights");
    });
}

#[test]
fn the_next_publisher_replaces_what_is_kept_and_wakes_readers() {
    leaves_nothing_open(|| {
        let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
        let scene = Scene::new();
        let first = scene.publisher(&writer, "first", b"first");
        first.keep("llama", scene.keeper.path()).unwrap();
        let (mut subscriber, before) = attach(&reader, scene.keeper.path());
        // The restarted program counts its versions anew.
        let second = scene.publisher(&writer, "second", b"second");
        assert_eq!(second.keep("llama", scene.keeper.path()).unwrap(), 1);
        let newer = subscriber.wait_for_newer(&before, Duration::from_secs(60));
        assert_eq!(newer.unwrap(), Some(1));
        let how = Attachment::builder(&reader.device);
        let after = subscriber.attach("llama", &how).unwrap();
        reads(&reader, &after, b"second");
        reads(&reader, &before, b"first");
        // The first publisher withdraws its own publication only.
        assert!(first.withdraw("llama"));
        assert!(scene.has(1));
        reads(&reader, &attach(&reader, scene.keeper.path()).1, b"second");
        // A newer version is kept when it is given too.
        assert_eq!(publish(&writer, &second, b"third"), 2);
        assert_eq!(second.list()[0].keeping, Keeping::No);
        assert!(scene.has(1));
        second.keep("llama", scene.keeper.path()).unwrap();
        assert!(scene.has(2));
        assert!(second.withdraw("llama"));
        assert!(scene.kept().is_empty());
    });
}

#[test]
fn a_keeper_takes_what_it_is_told_and_a_restarted_one_takes_it_again() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        assert_eq!(scene.keeper.take("llama", publisher.path()).unwrap(), 1);
        // Once more, and from the keeper itself.
        assert_eq!(scene.keeper.take("llama", publisher.path()).unwrap(), 1);
        assert_eq!(scene.keeper.take("llama", scene.keeper.path()).unwrap(), 1);
        assert!(scene.has(1));
        let Scene { folder, keeper } = scene;
        let path = keeper.path().to_owned();
        drop(keeper);
        let refused = publisher.keep("llama", &path).unwrap_err();
        assert!(
            matches!(refused, ShareError::Channel(ChannelError::NotListening(_))),
            "{refused}"
        );
        assert_eq!(publisher.list()[0].keeping, Keeping::No);
        let scene = Scene {
            keeper: Keeper::bind(&path, None).unwrap(),
            folder,
        };
        assert!(scene.kept().is_empty());
        scene.keeper.take("llama", publisher.path()).unwrap();
        drop(publisher);
        reads(&rig, &attach(&rig, &path).1, b"weights");
    });
}

#[test]
fn what_cannot_be_kept_changes_nothing() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        publisher.keep("llama", scene.keeper.path()).unwrap();
        let stays = |refused: Result<u64, ShareError>, why: &str| {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
            assert!(scene.has(1));
        };
        stays(publisher.keep("opt", scene.keeper.path()), "opt");
        stays(scene.keeper.take("opt", publisher.path()), "opt");
        stays(scene.keeper.take("llama", scene.path("nothing")), "nothing");
        // A publisher is no keeper, and drops nothing for a reader.
        stays(publisher.keep("llama", publisher.path()), "keeps nothing");
        let released = Subscriber::connect(publisher.path())
            .unwrap()
            .release("llama");
        stays(released.map(u64::from), "keeps nothing");
        // The driver makes no handle of the next version.
        publish(&rig, &publisher, b"second");
        let many = Region::builder(&rig.device, 100 * G).largest_extent(G);
        let many = common::committed(
            many.shareable(cuvmm::driver::HandleTypes::POSIX_FD),
            100 * G,
        );
        assert_eq!(many.extents().len(), 100);
        publisher
            .publish("llama", Manifest::default(), many)
            .unwrap();
        let failed = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults
            .arm(Fault::nth(70, failed).of(Call::MemExportToShareableHandle));
        stays(publisher.keep("llama", scene.keeper.path()), "refused");
        rig.faults.disarm();
        assert_eq!(publisher.list()[0].keeping, Keeping::No);
        assert_eq!(publisher.keep("llama", scene.keeper.path()).unwrap(), 3);
    });
}

/// A keeper has a quarter of the files that its process may open.
#[test]
fn descriptors_are_bounded() {
    in_a_child(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        let limit = getrlimit(Resource::Nofile);
        let most = (open_files().len() as u64 + 64) / 4 * 4;
        let limits = |current| Rlimit {
            current: Some(current),
            ..limit
        };
        setrlimit(Resource::Nofile, limits(most)).unwrap();
        let wide = Region::builder(&rig.device, 64 * G).largest_extent(G);
        let wide = common::committed(
            wide.shareable(cuvmm::driver::HandleTypes::POSIX_FD),
            (most / 4 - 1) * G,
        );
        let offered = publisher.publish("wide", Manifest::default(), wide);
        setrlimit(Resource::Nofile, limits(1024)).unwrap();
        offered.map_err(|refused| refused.reason).unwrap();
        setrlimit(Resource::Nofile, limits(most)).unwrap();
        // Two and all but one of them are too many.
        publisher.keep("llama", scene.keeper.path()).unwrap();
        let refused = publisher.keep("wide", scene.keeper.path()).unwrap_err();
        assert!(matches!(refused, ShareError::Refused(_)), "{refused}");
        assert!(scene.has(1));
        assert!(scene.keeper.release("llama"));
        setrlimit(Resource::Nofile, limits(1024)).unwrap();
        publisher.keep("wide", scene.keeper.path()).unwrap();
    });
}

/// Listens for a peer that is played by hand.
fn listening(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&socket, 1).unwrap();
    socket
}

/// A publisher that plays its part by hand.
fn play(scene: &Scene, part: impl FnOnce(&mut Raw) + Send) -> Result<u64, ShareError> {
    let path = scene.path("played");
    let socket = listening(&path);
    let taken = std::thread::scope(|scope| {
        let playing = scope.spawn(|| {
            let mut peer = Raw::over(accept(&socket).unwrap());
            assert!(peer.hear().is_some(), "a request");
            part(&mut peer);
        });
        let taken = scene.keeper.take("llama", &path);
        playing.join().unwrap();
        taken
    });
    std::fs::remove_file(path).unwrap();
    taken
}

#[test]
fn publishers_that_are_wrong_leave_nothing_with_a_keeper() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        publisher.keep("llama", scene.keeper.path()).unwrap();
        let region = shareable_region(&rig, 2);
        let offer = Offer::region(&region, 0..2 * G).unwrap();
        let description = offer.description().to_bytes();
        let handles = || -> Vec<_> {
            let (_, handles) = Parcel::into_parts(offer.parcel().unwrap());
            let descriptor = |handle| match handle {
                Exported::Fd(fd) => fd,
                other => panic!("{other:?}"),
            };
            handles.into_iter().map(descriptor).collect()
        };
        let published = |manifest: &str| {
            format!(r#"{{"Published":{{"publisher":9,"version":9,"manifest":{manifest}}}}}"#)
        };
        let beyond =
            r#"{"tensors":[{"name":"a","dtype":"U8","shape":[1],"offset":99999999,"size":1}]}"#;
        let empty = r#"{"tensors":[]}"#;
        let wrong: [&(dyn Fn(&mut Raw) + Sync); 8] = [
            &|_| {},
            &|peer| assert!(peer.say(TEXT, b"\"NotPublished\"", &[])),
            &|peer| assert!(peer.say(TEXT, br#"{"Kept":1}"#, &[])),
            // A description that is wrong.
            &|peer| {
                assert!(peer.say(TEXT, published(empty).as_bytes(), &[]));
                assert!(peer.say(DESCRIPTION, &[7; 200], &[]));
                peer.hear();
            },
            // Only some of the handles.
            &|peer| {
                assert!(peer.say(TEXT, published(empty).as_bytes(), &[]));
                assert!(peer.say(DESCRIPTION, &description, &[]));
                peer.hear();
                assert!(peer.say(HANDLES, &[], &lend(&handles()[..1])));
                peer.hear();
            },
            // More of them than extents.
            &|peer| {
                assert!(peer.say(TEXT, published(empty).as_bytes(), &[]));
                assert!(peer.say(DESCRIPTION, &description, &[]));
                peer.hear();
                let (one, other) = (handles(), handles());
                let all = [lend(&one), lend(&other)].concat();
                assert!(peer.say(HANDLES, &[], &all));
                peer.hear();
            },
            // Names of fabric handles.
            &|peer| {
                assert!(peer.say(TEXT, published(empty).as_bytes(), &[]));
                assert!(peer.say(DESCRIPTION, &description, &[]));
                peer.hear();
                assert!(peer.say(HANDLES, &[0; 128], &[]));
                peer.hear();
            },
            // A manifest of other memory.
            &|peer| {
                assert!(peer.say(TEXT, published(beyond).as_bytes(), &[]));
                assert!(peer.say(DESCRIPTION, &description, &[]));
                peer.hear();
                assert!(peer.say(HANDLES, &[], &lend(&handles())));
                peer.hear();
            },
        ];
        let before = open_files().len();
        for (number, wrong) in wrong.iter().enumerate() {
            let refused = play(&scene, wrong);
            assert!(refused.is_err(), "{number}: {refused:?}");
            assert!(scene.has(1), "{number}");
        }
        // The keeper's threads close their connections a moment later.
        let begun = std::time::Instant::now();
        while open_files().len() > before {
            assert!(begun.elapsed() < crate::share_support::PROMPT);
            std::thread::yield_now();
        }
        // The same words in the right order are taken.
        let taken = play(&scene, |peer| {
            assert!(peer.say(TEXT, published(empty).as_bytes(), &[]));
            assert!(peer.say(DESCRIPTION, &description, &[]));
            peer.hear();
            assert!(peer.say(HANDLES, &[], &lend(&handles())));
            peer.hear();
        });
        assert_eq!(taken.unwrap(), 9);
        assert!(scene.has(9));
    });
}

#[test]
fn a_keeper_that_is_dropped_waits_for_no_publisher() {
    leaves_nothing_open(|| {
        let scene = Scene::new();
        let listener = cuvmm::share::Listener::bind(scene.path("silent")).unwrap();
        let path = scene.path("silent").display().to_string();
        let mut asks = Raw::connect(scene.keeper.path());
        let request = format!(r#"{{"Keep":{{"name":"llama","socket":"{path}"}}}}"#);
        assert!(asks.say(TEXT, request.as_bytes(), &[]));
        // The keeper has asked, and gets no answer.
        let silent = listener.accept(Duration::from_secs(60)).unwrap();
        let begun = std::time::Instant::now();
        drop(scene.keeper);
        assert!(begun.elapsed() < crate::share_support::PROMPT);
        drop((silent, listener, asks));
    });
}

#[test]
fn a_forked_child_keeps_and_drops_nothing() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        publisher.keep("llama", scene.keeper.path()).unwrap();
        let child = crate::share_support::fork(|| {
            assert!(publisher.keep("llama", scene.keeper.path()).is_err());
            assert!(scene.keeper.take("llama", publisher.path()).is_err());
            assert!(!scene.keeper.release("llama") && !publisher.withdraw("llama"));
            assert!(scene.keeper.list().is_empty());
            drop_in_child(&scene.keeper);
            drop_in_child(&publisher);
        });
        assert_eq!(crate::share_support::ended(child, 10 * SHORT), Some(0));
        assert!(scene.has(1));
        drop(publisher);
        reads(&rig, &attach(&rig, scene.keeper.path()).1, b"weights");
    });
}

#[test]
fn names_are_checked() {
    leaves_nothing_open(|| {
        let scene = Scene::new();
        let long = "n".repeat(256);
        assert!(!scene.keeper.release(&long));
        let mut subscriber = Subscriber::connect(scene.keeper.path()).unwrap();
        assert!(!subscriber.release(&long).unwrap());
        let publisher = Publisher::bind(scene.path("publisher")).unwrap();
        let refused = scene.keeper.take(&long, publisher.path());
        assert!(
            matches!(refused, Err(ShareError::NotFound(_))),
            "{refused:?}"
        );
        drop((subscriber, publisher, scene));
    });
}

#[test]
fn all_keepers_drop_what_is_withdrawn() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let (scene, other) = (Scene::new(), Scene::new());
        let publisher = scene.publisher(&rig, "publisher", b"weights");
        for scene in [&scene, &other] {
            publisher.keep("llama", scene.keeper.path()).unwrap();
            assert!(scene.has(1));
        }
        assert!(publisher.withdraw("llama"));
        assert!(scene.kept().is_empty() && other.kept().is_empty());
    });
}

/// A version that is withdrawn while a keeper takes it is dropped there, and the next one is kept.
#[test]
fn a_name_that_is_withdrawn_and_published_while_it_is_given_is_kept_in_its_newest_version() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let scene = Scene::new();
        let publisher = scene.publisher(&rig, "publisher", b"first");
        let path = scene.path("played");
        let socket = listening(&path);
        let replies = [
            ("Keep", r#"{"Kept":1}"#),
            ("Release", r#"{"Released":true}"#),
            ("Keep", r#"{"Kept":2}"#),
            ("Keep", r#"{"Kept":1}"#),
        ];
        let play = |number: usize| {
            let (request, reply) = replies[number];
            let mut peer = Raw::over(accept(&socket).unwrap());
            let (_, heard, _) = peer.hear().expect("a request");
            let heard = String::from_utf8(heard).unwrap();
            assert!(heard.contains(request), "{number}: {heard}");
            if number == 0 {
                // The keeper has the first version, and the publisher does not know it yet.
                assert!(publisher.withdraw("llama"));
                assert_eq!(publish(&rig, &publisher, b"second"), 2);
            }
            assert!(peer.say(TEXT, reply.as_bytes(), &[]));
        };
        std::thread::scope(|scope| {
            let playing = scope.spawn(|| (0..4).for_each(play));
            assert_eq!(publisher.keep("llama", &path).unwrap(), 2);
            assert_eq!(publisher.list()[0].keeping, Keeping::Wanted);
            // A keeper that has no newer version than that is wrong.
            let refused = publisher.keep("llama", &path).unwrap_err();
            assert!(refused.to_string().contains("older"), "{refused}");
            playing.join().unwrap();
        });
    });
}
