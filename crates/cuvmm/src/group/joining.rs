//! Joining a group: a process takes the slot of a rank.
//!
//! A process holds the lock of [membership](super::membership) meanwhile. The first process after
//! all others have gone sets the number of ranks, and frees the slots of those that died. While a
//! rank is a member, the slot of one that died stays: operations name it, until another process
//! takes its place.

use std::path::Path;
use std::sync::Mutex;

use super::layout::{At, GroupFile, MAGIC, MOST_RANKS, Step, VERSION, is_taken};
use super::membership::Membership;
use super::rank::Rank;
use super::watch::Watch;
use crate::error::{ArgumentError, GroupError, LedgerError};
use crate::fork::OpeningProcess;
use crate::ledger::lock::Lock;
use crate::ledger::proc;
use crate::ledger::shared_file::Making;
use crate::modes;

/// The end of the name of every group's file. The name begins with the group's.
pub(super) const FILE_ENDING: &str = ".cuvmm-group";

/// In bytes.
const LONGEST_NAME: usize = 64;

/// Checks a name, which is a part of the file's.
pub(super) fn check_name(name: &str) -> Result<(), GroupError> {
    let is_usual = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_right = name.bytes().all(is_usual) && !name.starts_with('.');
    match is_right && (1..=LONGEST_NAME).contains(&name.len()) {
        true => Ok(()),
        false => Err(GroupError::Name {
            name: name.to_owned(),
            most: LONGEST_NAME,
        }),
    }
}

pub(super) fn join(
    directory: &Path,
    name: &str,
    ranks: u32,
    rank: Option<u32>,
) -> Result<Rank, GroupError> {
    check_name(name)?;
    ArgumentError::at_least("ranks of a group", ranks.into(), 1)?;
    ArgumentError::at_most("ranks of a group", ranks.into(), MOST_RANKS.into())?;
    if let Some(rank) = rank {
        ArgumentError::at_most("a rank of a group", rank.into(), (ranks - 1).into())?;
    }
    modes::make_directory(directory, 0o700).map_err(|failed| LedgerError::System {
        call: failed.call,
        path: directory.to_owned(),
        errno: failed.errno,
    })?;
    let path = directory.join(format!("{name}{FILE_ENDING}"));
    // The path is used later too, when the working directory may have changed.
    let path = std::path::absolute(&path).unwrap_or(path);
    let file = open(path)?;
    let mut watch = Watch::default();
    let joining = Membership::lock(&file)?;
    let ended = agree(&file, name, ranks, &mut watch)?;
    let index = choose(&file, name, rank, &ended)?;
    let state = take(&file, index);
    drop(joining);
    file.layout().header.bell.ring();
    Ok(Rank {
        name: name.to_owned(),
        file,
        ranks: ended.len(),
        index,
        state,
        opened_by: OpeningProcess::new(),
        watch: Mutex::new(watch),
    })
}

fn open(path: std::path::PathBuf) -> Result<GroupFile, GroupError> {
    let mut first = [0; 16];
    first[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    first[8..].copy_from_slice(&VERSION.to_ne_bytes());
    let making = Making {
        group: false,
        first: &first,
    };
    Ok(GroupFile::open_or_make(path, making, |file| {
        let header = &file.layout().header;
        // The machine failed before the file's maker had written it to disk.
        if [&header.magic, &header.version, &header.ranks]
            .iter()
            .all(|word| word.load() == 0)
        {
            header.version.store(VERSION);
            header.magic.store(MAGIC);
        }
        check(file)
    })?)
}

/// Checks that a file is a group's, of this version.
pub(super) fn check(file: &GroupFile) -> Result<(), LedgerError> {
    let header = &file.layout().header;
    if header.magic.load() != MAGIC {
        return Err(file.is_not_one("its first word is not that of a group".to_owned()));
    }
    let found = header.version.load();
    if found != VERSION {
        return Err(LedgerError::Version {
            path: file.path().to_owned(),
            found,
            supported: VERSION,
        });
    }
    let ranks = header.ranks.load();
    if ranks > u64::from(MOST_RANKS) {
        return Err(file.is_not_one(format!("it is for {ranks} ranks")));
    }
    if let Err(word) = header.round() {
        return Err(file.is_not_one(format!("its word of the round is {word:#x}")));
    }
    Ok(())
}

/// Sets the number of ranks if no rank is a member, or checks that it is this one. Returns for each
/// rank whether its slot is that of a process that has ended.
fn agree(
    file: &GroupFile,
    name: &str,
    ranks: u32,
    watch: &mut Watch,
) -> Result<Vec<bool>, GroupError> {
    let layout = file.layout();
    let mut ended = watch.ended(file, None, MOST_RANKS as usize);
    let slots = layout.slots.iter().zip(&mut ended);
    let lives = |slot: &super::layout::Slot, ended: bool| is_taken(slot.state.load()) && !ended;
    if slots.into_iter().all(|(slot, ended)| !lives(slot, *ended)) {
        for slot in layout.slots.iter() {
            let state = slot.state.load();
            if is_taken(state) {
                slot.state.store(state.wrapping_add(1));
            }
        }
        ended.fill(false);
        layout.header.ranks.store(ranks.into());
    }
    let found = layout.header.ranks.load();
    if found != u64::from(ranks) {
        return Err(GroupError::OtherRanks {
            group: name.to_owned(),
            ranks: u32::try_from(found).unwrap_or(u32::MAX),
            given: ranks,
        });
    }
    ended.truncate(ranks as usize);
    Ok(ended)
}

/// Returns the slot of a rank, or of the first one that is free, and locks it.
fn choose(
    file: &GroupFile,
    name: &str,
    rank: Option<u32>,
    ended: &[bool],
) -> Result<usize, GroupError> {
    let slots = file.layout().slots.iter().zip(ended).enumerate();
    let mut pid = 0;
    for (index, (slot, &ended)) in slots {
        if rank.is_some_and(|rank| rank as usize != index) {
            continue;
        }
        // A forked child of the last owner may have the lock.
        let is_free = !is_taken(slot.state.load()) || ended;
        let lock = Lock::Owner(index);
        if is_free && lock.take(file.file()).map_err(file.failed("fcntl"))? {
            return Ok(index);
        }
        pid = slot.pid();
    }
    Err(GroupError::Taken {
        group: name.to_owned(),
        ranks: ended.len() as u32,
        rank,
        pid,
    })
}

/// Takes a locked slot for this process. Returns its state.
fn take(file: &GroupFile, index: usize) -> u64 {
    let slot = &file.layout().slots[index];
    let before = slot.state.load();
    let free = match is_taken(before) {
        true => before.wrapping_add(1),
        false => before,
    };
    slot.state.store(free);
    slot.pid.store(proc::own_id().into());
    slot.started.store(proc::own_start());
    slot.namespace.store(proc::own_namespace());
    slot.set_at(At {
        number: 0,
        step: Step::None,
    });
    let taken = free.wrapping_add(1);
    slot.state.store(taken);
    taken
}
