//! Publishers, keepers and readers of one ledger that are killed one after the other: nothing stays
//! charged, no descriptor and no memory is left, and what a living keeper has is whole.
//!
//! Keeps I-116, I-117.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, Rig};
use crate::share_support::{PROMPT, alone, ended, fork, open_files};
use cuvmm::driver::HandleTypes;
use cuvmm::driver::host::HostMemory;
use cuvmm::error::{ChannelError, ShareError};
use cuvmm::ledger::ProcessState;
use cuvmm::share::{Keeper, Manifest, Publication, Publisher, Subscriber, sweep};
use cuvmm::{Attachment, Block, Ledger, LedgerView, Pool, Stream};

/// Granules of the ledger, of which leaks of a few lives would leave too little.
const LIMIT: u64 = 64;

/// Granules of a version.
const GRANULES: u64 = 4;

const LONG: Duration = Duration::from_secs(120);

/// A process's part in the ledger.
struct Member {
    rig: Rig<HostMemory>,
    ledger: Ledger,
    pool: Pool,
}

impl Member {
    fn join(folder: &Path, name: &str) -> Self {
        let rig = common::host();
        let ledger = Ledger::builder(&rig.device, folder.join("ledger"));
        let ledger = ledger.limit(LIMIT * G).name(name).open().unwrap();
        let pool = common::limited(&rig, LIMIT);
        let pool = pool.shareable(HandleTypes::POSIX_FD).ledger(&ledger);
        let pool = pool.build().unwrap();
        Self { rig, ledger, pool }
    }

    fn block(&self, granules: u64) -> Block {
        let tenant = self.pool.tenant("weights").register().unwrap();
        tenant.block(granules * G).timeout(LONG).allocate().unwrap()
    }

    /// Publishes a version that has a stamp in each granule.
    fn publish(&self, publisher: &Publisher, stamp: u64) -> u64 {
        let block = self.block(GRANULES);
        for granule in 0..GRANULES {
            block
                .write(granule * G, &(stamp + granule).to_le_bytes())
                .unwrap();
        }
        let mut manifest = Manifest::default();
        manifest
            .metadata
            .insert("stamp".to_owned(), stamp.to_string());
        publisher.publish("model", manifest, block).unwrap()
    }

    fn attach(&self, path: &Path) -> Result<Publication, ShareError> {
        let how = Attachment::builder(&self.rig.device).ledger(&self.ledger);
        Subscriber::connect(path)?.attach("model", &how)
    }

    /// Checks all granules of a version, and returns its stamp.
    fn check(&self, publication: &Publication) -> u64 {
        let stamp: u64 = publication.manifest().metadata["stamp"].parse().unwrap();
        let stream = Stream::legacy(&self.rig.device);
        for granule in 0..GRANULES {
            let mut word = [0; 8];
            let memory = publication.memory();
            memory.read(&stream, granule * G, &mut word).unwrap();
            assert_eq!(u64::from_le_bytes(word), stamp + granule);
        }
        stamp
    }
}

/// An outcome that the end of a peer explains.
fn is_death(error: &ShareError) -> bool {
    match error {
        ShareError::Channel(error) => {
            matches!(error, ChannelError::Closed | ChannelError::NotListening(_))
        }
        // The keeper's publisher has ended, or the owner's memory was refunded before it was named.
        ShareError::NotFound(_) | ShareError::GivenBack | ShareError::Refused(_) => true,
        _ => false,
    }
}

fn saw<T>(outcome: Result<T, ShareError>) -> Option<T> {
    match outcome {
        Ok(value) => Some(value),
        Err(error) if is_death(&error) => None,
        Err(error) => panic!("{error:?}"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Publisher,
    Keeper,
    Reader,
}

struct Scene {
    folder: tempfile::TempDir,
    living: Vec<(i32, Role)>,
    lives: u64,
}

impl Scene {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        Self {
            folder,
            living: vec![],
            lives: 0,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn mark(&self, name: &str) {
        std::fs::write(self.path(name), "").unwrap();
    }

    /// Starts a process, which writes a file of its number when it has done its part once.
    fn begin(&mut self, role: Role) -> u64 {
        self.lives += 1;
        let life = self.lives;
        let child = fork(|| self.live(role, life));
        self.living.push((child, role));
        life
    }

    fn live(&self, role: Role, life: u64) {
        match role {
            Role::Publisher => {
                let member = Member::join(self.folder.path(), "publisher");
                let publisher = Publisher::bind(self.path("publisher")).unwrap();
                for turn in 0.. {
                    member.publish(&publisher, life << 32 | turn << 8);
                    if saw(publisher.keep("model", self.path("keeper"))).is_some() {
                        self.mark(&life.to_string());
                    }
                }
            }
            Role::Keeper => {
                let ledgers = Some(self.path("ledger"));
                let keeper = Keeper::bind(self.path("keeper"), ledgers).unwrap();
                // A restarted keeper takes what a running publisher has.
                let _ = saw(keeper.take("model", self.path("publisher")));
                self.mark(&life.to_string());
                loop {
                    thread::park();
                }
            }
            Role::Reader => {
                let member = Member::join(self.folder.path(), "reader");
                let mut held = None;
                loop {
                    for socket in ["publisher", "keeper"] {
                        if let Some(read) = saw(member.attach(&self.path(socket))) {
                            member.check(&read);
                            held = Some(read);
                            self.mark(&life.to_string());
                        }
                    }
                    held.iter().for_each(|held| {
                        member.check(held);
                    });
                }
            }
        }
    }

    /// Waits until a process has done its part once. One that found a fault has ended.
    fn await_done(&self, life: u64) {
        let begun = Instant::now();
        while !self.path(&life.to_string()).exists() {
            assert!(begun.elapsed() < LONG, "process {life} does nothing");
            thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_file(self.path(&life.to_string())).unwrap();
    }

    /// Kills a process of a role. One that found a fault has ended by itself.
    fn kill(&mut self, role: Role) {
        let at = self.living.iter().position(|&(_, of)| of == role).unwrap();
        let (child, _) = self.living.remove(at);
        // SAFETY: the process is a child of this one that has not been waited for.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        assert_eq!(ended(child, PROMPT), Some(-1), "a {role:?}");
    }

    /// Kills the publisher and the readers, and checks that the keeper has no more descriptors than it
    /// needs.
    fn keeper_has_one_version(&mut self, inherited: usize) {
        while let Some(&(_, role)) = self.living.iter().find(|(_, role)| *role != Role::Keeper) {
            self.kill(role);
        }
        let (keeper, _) = self.living[0];
        // The socket, its lock, the waker, the spare descriptor; a ledger's file, its lock and socket,
        // and those of the processes that it knows; a version.
        let most = inherited + GRANULES as usize + 24;
        let open = || {
            std::fs::read_dir(format!("/proc/{keeper}/fd"))
                .unwrap()
                .count()
        };
        until("the keeper closes what was replaced", || open() <= most);
    }

    fn view(&self) -> LedgerView {
        let files = std::fs::read_dir(self.path("ledger")).unwrap().flatten();
        let mut files = files.map(|file| file.path());
        let is_ledger =
            |path: &PathBuf| path.to_string_lossy().ends_with(cuvmm::ledger::FILE_ENDING);
        LedgerView::open(files.find(is_ledger).unwrap()).unwrap()
    }

    /// Checks that nothing is charged once all processes have ended and another one joins.
    fn nothing_charged(&self) {
        let member = Member::join(self.folder.path(), "last");
        let view = self.view();
        until("the others are gone", || view.stats().processes.len() == 1);
        assert!(view.stats().exports.is_empty());
        drop(member.block(LIMIT));
        let Member { pool, ledger, rig } = member;
        pool.close().unwrap();
        drop(ledger);
        assert_eq!(view.stats().charged, 0);
        common::nothing_left(rig);
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a test alone, with the number of descriptors that are open, and waits until there are no more
/// again: a ledger's threads end some time after it.
fn leaves_nothing(test: impl FnOnce(usize)) {
    let _alone = alone();
    let before = open_files().len();
    test(before);
    until("the ledger's threads end", || open_files().len() <= before);
}

/// The server is killed, and started again: it attaches what it had published.
#[test]
fn a_killed_publisher_s_memory_stays_charged_once_and_readable_until_it_is_dropped() {
    leaves_nothing(|_| {
        let mut scene = Scene::new();
        let keeper = scene.begin(Role::Keeper);
        scene.await_done(keeper);
        let reader = Member::join(scene.folder.path(), "restarted");
        let view = scene.view();
        let publisher = scene.begin(Role::Publisher);
        scene.await_done(publisher);
        scene.kill(Role::Publisher);
        let charge = |state| {
            let stats = view.stats();
            let mut of = stats.processes.iter().filter(|it| it.state == state);
            (
                of.clone().map(|it| it.charged / G).sum::<u64>(),
                of.all(|it| it.name == "publisher"),
            )
        };
        until("the killed publisher lends what is kept", || {
            charge(ProcessState::Lending) == (GRANULES, true)
        });
        let holders = |view: &LedgerView| -> Vec<Vec<String>> {
            let stats = view.stats();
            let name = |slot: &usize| {
                let mut found = stats.processes.iter().filter(|it| it.slot == *slot);
                found.next().map_or_else(String::new, |it| it.name.clone())
            };
            let exports = stats.exports.iter();
            exports
                .map(|it| it.holders.iter().map(name).collect())
                .collect()
        };
        assert_eq!(holders(&view), [["keeper"]]);
        assert_eq!(view.stats().charged / G, GRANULES);
        let attached = reader.attach(&scene.path("keeper")).unwrap();
        assert_eq!(reader.check(&attached) >> 32, publisher);
        assert_eq!(holders(&view)[0].len(), 2);
        assert_eq!(view.stats().charged / G, GRANULES, "charged once");
        // The keeper is killed: the restarted server has the memory.
        scene.kill(Role::Keeper);
        until("the keeper's names are removed", || {
            holders(&view) == [["restarted"]]
        });
        assert_eq!(view.stats().charged / G, GRANULES);
        reader.check(&attached);
        drop(attached);
        until("nothing is charged", || view.stats().charged == 0);
        let Member { pool, ledger, .. } = reader;
        pool.close().unwrap();
        drop(ledger);
        scene.nothing_charged();
    });
}

#[test]
fn a_dropped_publication_is_charged_no_more_and_the_keeper_leaves_the_ledger() {
    leaves_nothing(|_| {
        let mut scene = Scene::new();
        let keeper = scene.begin(Role::Keeper);
        scene.await_done(keeper);
        let publisher = scene.begin(Role::Publisher);
        scene.await_done(publisher);
        scene.kill(Role::Publisher);
        let view = scene.view();
        until("the killed publisher lends what is kept", || {
            let stats = view.stats();
            let mut of = stats.processes.iter();
            of.any(|it| it.state == ProcessState::Lending && it.charged == GRANULES * G)
        });
        let mut subscriber = Subscriber::connect(scene.path("keeper")).unwrap();
        assert!(subscriber.release("model").unwrap());
        let member = Member::join(scene.folder.path(), "other");
        until("the keeper has left the ledger", || {
            view.stats().processes.len() == 1
        });
        assert!(view.stats().exports.is_empty());
        drop(member.block(LIMIT));
        drop((member, subscriber));
        scene.kill(Role::Keeper);
        scene.nothing_charged();
    });
}

/// Kills processes of all roles in a random order. Each life does its part once, so that the number of
/// kills says how often everything was at work.
fn storm(kills: u64) {
    leaves_nothing(|before| {
        let mut random = fastrand::Rng::with_seed(kills);
        let mut scene = Scene::new();
        for role in [Role::Keeper, Role::Publisher, Role::Reader, Role::Reader] {
            let life = scene.begin(role);
            scene.await_done(life);
        }
        let view = scene.view();
        for _ in 0..kills {
            let role = [Role::Keeper, Role::Publisher, Role::Reader][random.usize(..3)];
            scene.kill(role);
            let stats = view.stats();
            assert!(stats.charged <= stats.limit, "{stats}");
            let life = scene.begin(role);
            scene.await_done(life);
        }
        scene.keeper_has_one_version(before);
        while let Some(&(_, role)) = scene.living.first() {
            scene.kill(role);
        }
        scene.nothing_charged();
        for socket in ["publisher", "keeper"] {
            sweep(scene.path(socket)).unwrap();
        }
        for entry in std::fs::read_dir(scene.folder.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            // A killed process may have done its part again.
            assert!(name == "ledger" || name.parse::<u64>().is_ok(), "{name}");
        }
    });
}

#[test]
fn twenty_kills_leave_nothing() {
    storm(20);
}

/// `CUVMM_KEEPER_KILLS` sets the number.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn killed_publishers_keepers_and_readers_leave_nothing() {
    let kills = std::env::var("CUVMM_KEEPER_KILLS").ok();
    storm(kills.map_or(1000, |kills| kills.parse().unwrap()));
}
