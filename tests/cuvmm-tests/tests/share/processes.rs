//! Two, three and ten real processes, killed at random points a thousand times in all. No process
//! hangs, none sees stale or half-written memory, and killed processes leave nothing behind.
//!
//! `unsafe` is used to kill children of this process.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{G, Rig, shareable_region};
use crate::share_support::{PROMPT, alone, ended, fork, leaves_nothing_open, open_files};
use cuvmm::driver::HandleTypes;
use cuvmm::driver::host::HostMemory;
use cuvmm::error::{ChannelError, MemoryError, ShareError};
use cuvmm::share::{
    AllocationOffer, Listener, Manifest, PoolImporter, Publication, Publisher, Subscriber, sweep,
};
use cuvmm::{Attachment, Channel, MemPool, Offer, Region, Stream};

/// Granules of a version, each one extent.
const GRANULES: u64 = 2;

/// How long a child may take to end after it was told to.
const LONG: Duration = Duration::from_secs(30);

/// Initial mean lifetime of a process.
const LIFE: Duration = Duration::from_millis(60);

/// Longest mean lifetime, for machines on which shorter lives achieve nothing.
const LONGEST_LIFE: Duration = Duration::from_secs(4);

/// The writer of a version, and its number.
type Stamp = (u64, u64);

/// Returns the word at an offset of a version.
/// Bytes of memory that are computed; the other pages of a granule are copies of them.
const PAGE: u64 = 4096;

fn word(stamp: Stamp, offset: u64) -> u64 {
    (stamp.0.rotate_left(32) ^ stamp.1)
        .wrapping_add(offset)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Returns a granule in which every word encodes the writer, the version, the granule and the offset in
/// its page.
fn granule(stamp: Stamp, number: u64) -> Vec<u8> {
    let words = (0..PAGE / 8).map(|index| word(stamp, number * G + index * 8));
    let page: Vec<u64> = words.collect();
    bytemuck::cast_slice(&page).repeat((G / PAGE) as usize)
}

/// Creates memory that consists of [`granule`]s.
fn stamped(rig: &Rig<HostMemory>, stamp: Stamp) -> Region {
    let region = shareable_region(rig, GRANULES);
    let stream = Stream::legacy(&rig.device);
    for number in 0..GRANULES {
        let bytes = granule(stamp, number);
        region.write(&stream, number * G, &bytes).unwrap();
    }
    region
}

fn check(rig: &Rig<HostMemory>, memory: &Attachment, stamp: Stamp) {
    assert_eq!(memory.held(), GRANULES * G);
    let stream = Stream::legacy(&rig.device);
    let mut bytes = vec![0; G as usize];
    for number in 0..GRANULES {
        memory.read(&stream, number * G, &mut bytes).unwrap();
        let right = bytes == granule(stamp, number);
        assert!(right, "granule {number} of version {stamp:?}");
    }
}

/// Checks memory that was sent without a manifest, by the stamp in its first word.
fn check_by_itself(rig: &Rig<HostMemory>, memory: &Attachment) {
    let mut first = [0; 8];
    let stream = Stream::legacy(&rig.device);
    memory.read(&stream, 0, &mut first).unwrap();
    let first = u64::from_le_bytes(first);
    let mut stamps = (0..EDITIONS).map(|published| (GIVER, published));
    let stamp = stamps.find(|&stamp| word(stamp, 0) == first);
    check(rig, memory, stamp.expect("a giver's stamp"));
}

/// The writer in all givers' stamps, because their memory has no manifest.
const GIVER: u64 = 7;

/// Number of different versions that givers send.
const EDITIONS: u64 = 10_000;

/// Parameters of a child.
struct Place<'a> {
    folder: &'a Path,
    /// Receives a byte for each version that was found complete.
    seen: &'a PipeWriter,
    /// Different for every child.
    life: u64,
}

impl Place<'_> {
    fn published(&self) -> PathBuf {
        self.folder.join("published")
    }

    fn given(&self) -> PathBuf {
        self.folder.join("given")
    }

    fn is_over(&self, role: Role) -> bool {
        self.folder.join(role.word()).exists()
    }

    fn saw(&self) {
        // If the pipe is full, the parent has enough bytes to read.
        drop((&mut &*self.seen).write(&[1]));
    }

    fn nap(&self) {
        thread::sleep(Duration::from_micros(500));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Publisher,
    Subscriber,
    Giver,
    Taker,
    /// Gives an allocation of a memory pool.
    PoolGiver,
    PoolTaker,
}

impl Role {
    fn word(self) -> &'static str {
        match self {
            Self::Publisher => "no-publisher",
            Self::Subscriber => "no-subscriber",
            Self::Giver => "no-giver",
            Self::Taker => "no-taker",
            Self::PoolGiver => "no-pool-giver",
            Self::PoolTaker => "no-pool-taker",
        }
    }

    /// Runs until the child is told to end.
    fn live(self, place: &Place<'_>) {
        match self {
            Self::Publisher => publish(place),
            Self::Subscriber => subscribe(place),
            Self::Giver => give(place),
            Self::Taker => take(place),
            Self::PoolGiver => give_allocations(place),
            Self::PoolTaker => take_allocations(place),
        }
    }
}

fn publish(place: &Place<'_>) {
    let rig = common::clean(common::host());
    let publisher = Publisher::bind(place.published()).unwrap();
    for published in 1.. {
        if place.is_over(Role::Publisher) {
            break;
        }
        let stamp = (place.life, published);
        let mut manifest = Manifest::default();
        let (life, number) = (stamp.0.to_string(), stamp.1.to_string());
        manifest.metadata.insert("life".to_owned(), life);
        manifest.metadata.insert("version".to_owned(), number);
        let memory = stamped(&rig, stamp);
        let version = publisher.publish("model", manifest, memory).unwrap();
        assert_eq!(version, published);
        place.nap();
    }
}

/// Returns `true` if the error is what a killed peer causes.
fn is_death(error: &ChannelError) -> bool {
    matches!(
        error,
        ChannelError::Closed | ChannelError::NotListening { .. }
    )
}

fn stamp_of(publication: &Publication) -> Stamp {
    let number = |name: &str| publication.manifest().metadata[name].parse().unwrap();
    let stamp = (number("life"), number("version"));
    assert_eq!(stamp.1, publication.version());
    stamp
}

fn subscribe(place: &Place<'_>) {
    let rig = common::clean(common::host());
    let how = Attachment::builder(&rig.device);
    let mut before: Option<Publication> = None;
    while !place.is_over(Role::Subscriber) {
        let begun = Instant::now();
        let outcome = follow(place, &rig, &how, &mut before);
        assert!(begun.elapsed() < LONG);
        match outcome {
            Ok(()) | Err(ShareError::NotFound { .. }) => place.nap(),
            Err(ShareError::Channel(error)) if is_death(&error) => place.nap(),
            Err(error) => panic!("a subscriber: {error:?}"),
        }
    }
}

/// Reads version after version from one publisher.
fn follow(
    place: &Place<'_>,
    rig: &Rig<HostMemory>,
    how: &cuvmm::share::AttachmentBuilder<'_>,
    before: &mut Option<Publication>,
) -> Result<(), ShareError> {
    let mut subscriber = Subscriber::connect(place.published())?;
    while !place.is_over(Role::Subscriber) {
        let begun = Instant::now();
        let newest = subscriber.attach("model", how)?;
        assert!(begun.elapsed() < PROMPT);
        let stamp = stamp_of(&newest);
        check(rig, newest.memory(), stamp);
        place.saw();
        if let Some(before) = before {
            // The older version is unchanged, whatever became of its publisher.
            let old = stamp_of(before);
            check(rig, before.memory(), old);
            assert!(old.0 != stamp.0 || old.1 <= stamp.1, "{old:?}, {stamp:?}");
        }
        let newer = subscriber.wait_for_newer(&newest, Duration::from_millis(20));
        *before = Some(newest);
        assert!(newer?.is_none_or(|version| version > stamp.1));
    }
    Ok(())
}

fn give(place: &Place<'_>) {
    let rig = common::clean(common::host());
    let listener = Listener::bind(place.given()).unwrap();
    for published in 1.. {
        if place.is_over(Role::Giver) {
            break;
        }
        let region = stamped(&rig, (GIVER, published % EDITIONS));
        let offer = Offer::region(&region, 0..GRANULES * G).unwrap();
        // The attachment outlives its giver.
        drop(region);
        let mut channel = match listener.accept(Duration::from_millis(20)) {
            Ok(channel) => channel,
            Err(ChannelError::TimedOut { .. }) => continue,
            Err(error) => panic!("a listener: {error:?}"),
        };
        let begun = Instant::now();
        match channel.send(&offer) {
            Ok(()) => {}
            Err(ShareError::Channel(error)) if is_death(&error) => {}
            Err(error) => panic!("a giver: {error:?}"),
        }
        assert!(begun.elapsed() < PROMPT);
    }
    drop(listener);
    let begun = Instant::now();
    while rig.machine.live().exported_only > 0 && begun.elapsed() < PROMPT {
        place.nap();
    }
}

fn take(place: &Place<'_>) {
    let rig = common::clean(common::host());
    while !place.is_over(Role::Taker) {
        let begun = Instant::now();
        let taken = Channel::connect(place.given())
            .map_err(ShareError::Channel)
            .and_then(|mut channel| channel.recv(&Attachment::builder(&rig.device)));
        match taken {
            Ok(memory) => {
                check_by_itself(&rig, &memory);
                place.saw();
            }
            Err(ShareError::Channel(error)) if is_death(&error) => place.nap(),
            Err(error) => panic!("a taker: {error:?}"),
        }
        assert!(begun.elapsed() < PROMPT);
    }
}

/// Gives allocations of one pool, and reuses its memory once takers have let go or were killed.
fn give_allocations(place: &Place<'_>) {
    let rig = common::clean(common::host());
    let listener = Listener::bind(place.given()).unwrap();
    let pool = MemPool::builder(&rig.device).shareable(HandleTypes::POSIX_FD);
    let pool = pool.create().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    for published in 1.. {
        if place.is_over(Role::PoolGiver) {
            break;
        }
        let stamp = (GIVER, published % EDITIONS);
        let memory = pool.allocate_on(&stream, GRANULES * G).unwrap();
        for number in 0..GRANULES {
            let bytes = granule(stamp, number);
            memory.write(&stream, number * G, &bytes).unwrap();
        }
        let offer = AllocationOffer::new(&memory).unwrap();
        // It is freed when the taker has let it go.
        drop(memory);
        let mut channel = match listener.accept(Duration::from_millis(20)) {
            Ok(channel) => channel,
            Err(ChannelError::TimedOut { .. }) => continue,
            Err(error) => panic!("a listener: {error:?}"),
        };
        let begun = Instant::now();
        match channel.send_allocations(&offer) {
            Ok(()) => {}
            Err(ShareError::Channel(error)) if is_death(&error) => {}
            Err(error) => panic!("a giver: {error:?}"),
        }
        assert!(begun.elapsed() < PROMPT);
        // A taker has one allocation at a time.
        assert!(pool.held_elsewhere() <= 8 * GRANULES * G);
    }
    drop(listener);
    let begun = Instant::now();
    while pool.held_elsewhere() > 0 && begun.elapsed() < PROMPT {
        place.nap();
    }
}

fn take_allocations(place: &Place<'_>) {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let importer = PoolImporter::new(&rig.device, &stream).unwrap();
    let mut bytes = vec![0; (GRANULES * G) as usize];
    while !place.is_over(Role::PoolTaker) {
        let begun = Instant::now();
        let taken = Channel::connect(place.given())
            .map_err(ShareError::Channel)
            .and_then(|mut channel| channel.recv_allocations(&importer))
            .and_then(|taken| Ok(taken[0].read(&stream, 0, &mut bytes)?));
        match taken {
            Ok(()) => {
                let first = u64::from_le_bytes(*bytes.first_chunk().unwrap());
                let stamps = (0..EDITIONS).map(|published| (GIVER, published));
                let stamp = { stamps }.find(|&stamp| word(stamp, 0) == first);
                let stamp = stamp.expect("a giver's stamp");
                let all: Vec<u8> = (0..GRANULES).flat_map(|at| granule(stamp, at)).collect();
                assert!(bytes == all, "version {stamp:?}");
                place.saw();
            }
            Err(ShareError::Channel(error)) if is_death(&error) => place.nap(),
            Err(ShareError::Memory(MemoryError::GiverGone)) => place.nap(),
            Err(error) => panic!("a taker: {error:?}"),
        }
        assert!(begun.elapsed() < PROMPT);
    }
}

/// Processes that are killed and restarted.
struct Crowd {
    folder: tempfile::TempDir,
    seen: (PipeReader, PipeWriter),
    living: BTreeMap<i32, Role>,
    lives: u64,
    life: Duration,
    random: fastrand::Rng,
}

impl Crowd {
    fn of(roles: &[Role], seed: u64) -> Self {
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let mut crowd = Self {
            folder: tempfile::tempdir().unwrap(),
            seen: (reader, writer),
            living: BTreeMap::new(),
            lives: 0,
            life: LIFE,
            random: fastrand::Rng::with_seed(seed),
        };
        roles.iter().for_each(|&role| crowd.begin(role));
        crowd
    }

    fn begin(&mut self, role: Role) {
        self.lives += 1;
        let place = Place {
            folder: self.folder.path(),
            seen: &self.seen.1,
            life: self.lives,
        };
        let child = fork(|| role.live(&place));
        self.living.insert(child, role);
    }

    /// Kills a random child whose role matches, at a random point, and restarts it.
    fn kill(&mut self, meant: impl Fn(Role) -> bool) {
        // Keeps the mean lifetime independent of the number of children.
        let most = self.life / self.living.len() as u32;
        thread::sleep(most.mul_f64(self.random.f64()));
        let candidates: Vec<(i32, Role)> = self
            .living
            .iter()
            .map(|(&child, &role)| (child, role))
            .filter(|&(_, role)| meant(role))
            .collect();
        let (child, role) = candidates[self.random.usize(0..candidates.len())];
        // SAFETY: the process is a child of this one that has not been waited for.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        self.living.remove(&child);
        // A child that found an error has ended by itself and printed it.
        assert_eq!(ended(child, LONG), Some(-1), "a {role:?}");
        self.begin(role);
    }

    fn seen(&mut self) -> usize {
        let mut bytes = vec![];
        // The read ends with the error of an empty pipe.
        drop(self.seen.0.read_to_end(&mut bytes));
        bytes.len()
    }

    /// Tells all children of a role to end. They end in time, with everything released.
    fn end(&mut self, role: Role) {
        std::fs::write(self.folder.path().join(role.word()), "").unwrap();
        let ending: Vec<i32> = self
            .living
            .iter()
            .filter(|&(_, of)| *of == role)
            .map(|(&child, _)| child)
            .collect();
        for child in ending {
            self.living.remove(&child);
            assert_eq!(ended(child, LONG), Some(0), "a {role:?} at its end");
        }
    }

    fn end_all(mut self) {
        let takers = [Role::Taker, Role::PoolTaker, Role::Subscriber];
        let givers = [Role::Giver, Role::PoolGiver, Role::Publisher];
        for role in takers.into_iter().chain(givers) {
            self.end(role);
            drop(std::fs::remove_file(self.folder.path().join(role.word())));
        }
        let left: Vec<_> = std::fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Returns the machine's shared memory in bytes, which the host driver's memory counts as.
fn shared_memory() -> u64 {
    let all = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = all.lines().find(|line| line.starts_with("Shmem:")).unwrap();
    let number = line.split_whitespace().nth(1).unwrap();
    number.parse::<u64>().unwrap() << 10
}

fn killed(roles: &[Role], kills: u64) {
    leaves_nothing_open(|| {
        let before = shared_memory();
        let mut crowd = Crowd::of(roles, kills);
        let mut seen = 0;
        for number in 1..=kills {
            crowd.kill(|_| true);
            seen += crowd.seen();
            // On a busy machine lifetimes grow if too few versions are read.
            if number.is_multiple_of(10) && (seen as u64) < number / 5 {
                crowd.life = (2 * crowd.life).min(LONGEST_LIFE);
            }
        }
        assert!(
            seen as u64 > kills / 10,
            "{seen} versions read in {kills} lives"
        );
        // The surviving processes continue to work with each other.
        let begun = Instant::now();
        let enough = seen + 20;
        while seen < enough {
            assert!(
                begun.elapsed() < LONG,
                "the readers read no more versions: {seen}"
            );
            thread::sleep(Duration::from_millis(1));
            seen += crowd.seen();
        }
        crowd.end_all();
        // Other programs may use shared memory meanwhile; leaks of all the killed processes would
        // be much larger.
        let had = kills * GRANULES * G;
        let begun = Instant::now();
        while shared_memory() > before + had / 2 {
            assert!(begun.elapsed() < LONG, "about {had} bytes were left behind");
            thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two() {
    killed(&[Role::Giver, Role::Taker], 200);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn two_with_a_memory_pool() {
    killed(&[Role::PoolGiver, Role::PoolTaker], 200);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn four_with_a_memory_pool() {
    let mut roles = vec![Role::PoolGiver];
    roles.resize(4, Role::PoolTaker);
    killed(&roles, 200);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn three() {
    killed(&[Role::Publisher, Role::Subscriber, Role::Subscriber], 300);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn ten() {
    let mut roles = vec![Role::Publisher, Role::Giver, Role::Taker, Role::Taker];
    roles.resize(10, Role::Subscriber);
    killed(&roles, 400);
}

/// Dead readers cost a living publisher neither descriptors nor memory.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_publisher_outlives_its_readers() {
    let _alone = alone();
    let mut crowd = Crowd::of(&[Role::Publisher], 1);
    let publisher = *crowd.living.keys().next().unwrap();
    let open = || {
        let folder = format!("/proc/{publisher}/fd");
        std::fs::read_dir(folder).unwrap().count()
    };
    (0..4).for_each(|_| crowd.begin(Role::Subscriber));
    for _ in 0..100 {
        crowd.kill(|role| role == Role::Subscriber);
    }
    crowd.end(Role::Subscriber);
    // At most two versions with a descriptor per extent, one connection more or less, the common
    // file, the lock, the socket, the waker, and the descriptors that the process started with.
    let most = open_files().len() + 2 * GRANULES as usize + 8;
    let begun = Instant::now();
    while open() > most {
        assert!(begun.elapsed() < PROMPT, "{} descriptors", open());
        thread::sleep(Duration::from_millis(2));
    }
    // At its end the child checks that the driver has everything back.
    crowd.end_all();
}

/// The files of a killed publisher are swept explicitly, or by the next publisher.
#[test]
fn what_the_killed_leave_is_swept() {
    let _alone = alone();
    let mut crowd = Crowd::of(&[Role::Publisher, Role::Giver], 2);
    for _ in 0..20 {
        crowd.kill(|_| true);
    }
    for &child in crowd.living.keys() {
        // SAFETY: the process is a child of this one that has not been waited for.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        assert_eq!(ended(child, LONG), Some(-1));
    }
    let path = |name: &str| crowd.folder.path().join(name);
    for name in ["published", "given"] {
        sweep(path(name)).unwrap();
        assert!(!sweep(path(name)).unwrap(), "the files were swept already");
    }
    assert_eq!(std::fs::read_dir(crowd.folder.path()).unwrap().count(), 0);
}
