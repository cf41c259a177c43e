//! One budget of a device's memory for all processes that use the device.
//!
//! Each process opens the same [`Ledger`] and builds its pools with it
//! ([`PoolBuilder::ledger`](crate::pool::PoolBuilder::ledger)). From then on the memory that all
//! these pools have from the driver never exceeds the ledger's limit. There is no daemon: the
//! ledger is a file of about 83 KiB that the processes map. The file survives `kill -9` of any of
//! them at any instruction.
//!
//! A ledger is an agreement between programs that use it. It cannot keep other programs from
//! allocating memory; only the driver can.
//!
//! # What a process is charged
//! A process is charged for memory before its pools create it, in pieces of a 16th of the least of
//! the ledger's limit, the process's and the pool's, but at most 64 MiB; or, if less is left, of what
//! is needed. Cached memory and small growth are served from what the process has, without touching
//! the file. Memory released to the driver is refunded, except less than two pieces that each pool
//! keeps for its next allocations. It refunds these after a second without allocations,
//! and at once when another process waits.
//!
//! A [guarantee](LedgerBuilder::guarantee) is charged in advance and never refunded, so it is
//! always there. Memory above the guarantees goes to the process that asks first.
//!
//! # Memory that another process needs
//! A request with a timeout waits when the budget is used up. It shows the other processes what it
//! lacks and wakes their ledger threads. These release cached memory, down to their guarantees: the
//! process furthest above its guarantee goes first, then the lower priority. After 5 ms all
//! processes release. Then each process calls functions of its program, in the same order, 50 ms
//! apart: first the [pressure hooks](crate::pool::TenantBuilder::on_pressure) of its tenants, then,
//! if the process [allows it](LedgerBuilder::sleep_for_others), the function that puts tenants to
//! sleep. They are called until enough memory is idle: the function for sleep once for a waiting
//! request, hooks again about once a second while it waits. Memory in use is never taken unless the
//! program frees it. For a request of one pool a process also calls the hooks of its other pools.
//!
//! While a request waits, a later new block of another process passes it only if the request then
//! still waits for nothing but memory that was charged before it came. Blocks that pass have
//! together at most what the request, its process and the other processes' guarantees leave of the
//! limit. So a large request does not hold up small blocks, and they do not hold it up. Other new
//! blocks are refused ([`LedgerRefusal::OlderRequest`](crate::error::LedgerRefusal::OlderRequest))
//! beyond the guarantee of their process, and so is every new block while its process has idle
//! memory that the waiting request lacks: the process releases that memory first. Existing blocks
//! can still grow: otherwise work that has begun would give up its memory for work that has not.
//! Each request has its own place in the line, not that of its process's oldest request: a future
//! from its first poll on, a call from the refusal on that follows the hooks of its own pool. It
//! counts until it ends or its deadline passes, also while a hook keeps its thread.
//!
//! A stopped process (`SIGSTOP`) releases nothing and delays other processes by at most 100 ms:
//! after that its waiting requests no longer count. Its memory stays charged to it. A process that
//! is stopped while it joins delays no process: it holds only the lock of the slot that it is
//! taking.
//!
//! # Processes that die
//! The memory of a killed process counts until the process is known to have ended, and on a GPU 100
//! ms longer, because the driver may free it late. Other processes notice the end within a second,
//! and within 5 ms while one of them waits for memory. Each process holds a descriptor (pidfd) of
//! every other process, and polls all of them. Processes in other PID namespaces, such as
//! containers, cannot be looked up by number: their descriptors come over their sockets while they
//! run. Where there is no descriptor (before Linux 5.3, or where a seccomp profile forbids it), the
//! memory counts until the process's number is unused or another process's, or its state in `/proc`
//! says that it has ended.
//!
//! Nothing is known of a process in another PID namespace that had no socket ([`Remote::Nothing`])
//! or ended before any other process met it, nor where `/proc` is another namespace's or hides the
//! process. Such memory counts for two seconds after the kernel has released the process's locks. A
//! forked child that outlives its parent keeps these locks. A process that runs another program in
//! its place (`exec`) has not ended: drop its pools and ledger first.
//!
//! A forked child is no member: every call that needs the ledger is an error there.
//!
//! # Figures and commands
//! [`LedgerView`] shows the figures of all processes, and [`LedgerView::control`] asks one process
//! for the figures of its tenants or changes its terms, as the commands `cuvmm top` and `cuvmm ctl`
//! do. [`LedgerBuilder::remote`] sets what a process allows.
//!
//! # Stall times
//! A process is stalled *some* of the time while at least one of its requests waits for memory of
//! other processes. It is stalled *in full* while no tenant can be expected to go on: each of its
//! pools has a waiting request, and so has each tenant of these pools that has memory in use. So a
//! process with one tenant is stalled in full whenever it is stalled. Tenants with nothing in use
//! do not count. The library does not know which tenants launch work on their memory. The whole
//! ledger is stalled some of the time while a process waits, and in full while each running process
//! that has memory is stalled in full. These are the terms of Linux's pressure stall information,
//! and the [averages](StallAverages) are computed in the same way. The times are counted when a
//! waiting request tries again, every few milliseconds. A stopped process adds at most 100 ms.
//!
//! # Trust
//! The file belongs to one user (mode 0600), or also to a group ([`LedgerBuilder::group`]). A
//! program that can write the file can deny memory to all processes, promise them too much, or end
//! them by truncating the file (`SIGBUS`). It cannot make them read or write other memory. Files on
//! network file systems, FUSE and overlayfs are refused. All blocks of the file are allocated
//! before its first use, so a full file system is an error when the ledger is opened, and ends no
//! process later.
//!
//! If the file is removed, as session managers do with the directories of users who have logged
//! out, or shortened, processes that have it open are refused further memory at once
//! ([`LedgerRefusal::Replaced`](crate::error::LedgerRefusal::Replaced)); their memory stays usable.
//! They notice within a second that it was moved to another path.
//!
//! # Memory shared with other processes
//! Pool memory that other processes attach is charged once, to the process that created it. An
//! importer names the ledger before it imports:
//! [`AttachmentBuilder::ledger`](crate::share::AttachmentBuilder::ledger). If the creator frees the
//! memory, leaves or ends, the memory stays charged to the creator's slot until no process of the
//! ledger has it attached ([`ProcessState::Lending`]). A process that has the memory can pass it on to
//! others, which name it too: a [`Keeper`](crate::share::Keeper) does, which has no device of its own.
//! Memory whose importers name no ledger, and memory whose handle the program passes on by itself
//! ([`Block::export`](crate::pool::Block::export)), counts as foreign once the creator has freed
//! it.
//!
//! # Foreign memory
//! Memory of the device that no pool of the ledger has is *foreign*: contexts, other libraries and
//! other programs. Processes measure it (`cuMemGetInfo`) each second, and when a request is refused
//! while foreign memory leaves less than the limit. Requests are then refused as if what the device
//! leaves were the limit ([`LedgerRefusal::Foreign`](crate::error::LedgerRefusal::Foreign)), until
//! the foreign memory is less.
//!
//! A memory pool of the driver ([`mem_pool`](crate::mem_pool)) is charged with all that it may
//! hold, but its obtained bytes are what it was last seen to hold. Memory that another library
//! allocates from such a pool counts as foreign until its process has read the figures again:
//! within a second, or at once while a request waits.

mod appeal;
pub(crate) mod bell;
mod charge;
pub(crate) mod clock;
mod control;
mod dead;
mod exports;
mod file;
mod foreign;
mod givers;
pub(crate) mod holding;
mod joining;
mod keeper;
mod layout;
pub(crate) mod lock;
mod member;
#[cfg(feature = "metrics")]
mod metrics;
mod passing;
mod places;
pub(crate) mod proc;
mod seen;
pub(crate) mod shared_file;
mod stall;
mod stats;
mod turns;
mod waiting;
mod waits;
pub(crate) mod word;

#[cfg(test)]
mod charge_tests;
#[cfg(test)]
pub(crate) mod crash;
#[cfg(test)]
mod explore;
#[cfg(test)]
mod exports_tests;
#[cfg(test)]
mod machine_tests;
#[cfg(test)]
mod probe;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waiting_tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, atomic as atomics};
use std::time::{Duration, Instant};

use cuvmm_driver::DriverKind;

use self::charge::MOST;
use self::control::Commands;
use self::file::Terms;
use self::joining::Wishes;
use self::member::check_limit;
use self::seen::Seen;
use crate::device::Device;
use crate::driver::memory_option;
use crate::error::{ArgumentError, LedgerError};
use crate::modes;

pub use control::{Control, GroupRequest, PoolReport, ProcessReport, Remote, TenantReport};
pub(crate) use givers::{Giver, Hook};
pub(crate) use member::{Member, NamedExport, OpenOffer};
#[cfg(feature = "metrics")]
pub use metrics::open_metrics;
pub(crate) use places::InLine;
pub use stats::{
    ExportStats, GivenStats, LedgerStats, LedgerView, ProcessState, ProcessStats, StallAverages,
};
pub(crate) use waiting::Waiting;
pub use waits::{HolderStats, WaitStats};

/// The end of the name of every ledger's file. The name begins with the device's UUID.
pub const FILE_ENDING: &str = ".cuvmm-ledger";

/// A builder of a [`Ledger`], made by [`Ledger::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is opened before `open`"]
pub struct LedgerBuilder<'a> {
    device: &'a Device,
    directory: PathBuf,
    limit: Option<u64>,
    guarantee: u64,
    process_limit: Option<u64>,
    priority: i32,
    timeout: Duration,
    name: Option<String>,
    commands: Commands,
}

impl LedgerBuilder<'_> {
    /// Sets how much memory all processes together may have, in bytes, rounded down to whole
    /// granules. The first process sets the limit: while other processes use the ledger, opening it
    /// with another limit fails. By default the limit is the one that the ledger has, or, for the
    /// first process, the device's memory.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Sets how much memory this process can always have, in bytes, rounded up to whole granules; 0
    /// by default. The guarantee is charged when the ledger is opened, which can wait for it
    /// ([`timeout`](Self::timeout)).
    pub const fn guarantee(mut self, bytes: u64) -> Self {
        self.guarantee = bytes;
        self
    }

    /// Sets how much memory this process may have at most, in bytes; the ledger's limit by default.
    #[doc(alias = "quota")]
    pub const fn process_limit(mut self, bytes: u64) -> Self {
        self.process_limit = Some(bytes);
        self
    }

    /// Sets how long [`open`](Self::open) waits for the guarantee if other processes have the
    /// memory; by default it does not wait. Meanwhile other processes release idle memory, as for
    /// any [waiting request](self#memory-that-another-process-needs).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the process's priority, 0 by default. Of processes that are equally far above their
    /// guarantees, those of lower priorities [release memory](self#memory-that-another-process-needs)
    /// first.
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the name under which other processes see this one, cut to 64 bytes; the program's name
    /// by default. A name is not empty, is no number, and has no control characters, so that the
    /// command `cuvmm` can show and take it.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets whether processes of the file's group may use the ledger too; off by default. The file
    /// then has mode 0660. All processes have to set the same value.
    pub const fn group(mut self, yes: bool) -> Self {
        self.commands.group = yes;
        self
    }

    /// Sets which requests of other programs, such as the command `cuvmm`, this process answers;
    /// [`Changes`](Remote::Changes) by default. Only processes of the same user, or of the group,
    /// are answered; see [`Control`].
    pub const fn remote(mut self, remote: Remote) -> Self {
        self.commands.remote = remote;
        self
    }

    /// Sets a function with which other programs can put a tenant of this process, given by name,
    /// or all tenants to sleep. Only the program knows when no work is queued on a tenant's blocks,
    /// so without such a function no tenant is put to sleep from outside.
    ///
    /// The function runs on a thread of the ledger, one call at a time, and may use the whole
    /// library. It returns its reason if it refuses. Other requests wait while it runs. It is
    /// dropped when the process leaves the ledger, so a pool or tenant that it owns keeps the
    /// process in the ledger.
    pub fn on_sleep(
        mut self,
        hook: impl Fn(Option<&str>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        self.commands.sleep = Some(Arc::new(hook));
        self
    }

    /// Sets whether tenants are also put to sleep when other processes wait for memory that neither
    /// idle memory nor [pressure hooks](crate::pool::TenantBuilder::on_pressure) provide; off by
    /// default. The function of [`on_sleep`](Self::on_sleep) is called for one tenant after the
    /// other that holds memory above its guarantee, the lowest priority first, until enough memory
    /// is idle.
    pub const fn sleep_for_others(mut self, yes: bool) -> Self {
        self.commands.sleeps_for_others = yes;
        self
    }

    /// Sets a function with which other programs can wake a tenant, given by name, or all tenants.
    /// It is called like the function of [`on_sleep`](Self::on_sleep).
    pub fn on_wake(
        mut self,
        hook: impl Fn(Option<&str>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        self.commands.wake = Some(Arc::new(hook));
        self
    }

    /// Sets a function with which other programs put the blocks of a [group](crate::Group) to sleep
    /// or wake them. They ask all ranks at once, and the function of each calls
    /// [`Group::sleep`](crate::Group::sleep) or [`wake`](crate::Group::wake), or refuses a group that
    /// it does not know. It is called like the function of [`on_sleep`](Self::on_sleep).
    pub fn on_group(
        mut self,
        hook: impl Fn(&GroupRequest) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        self.commands.on_group = Some(Arc::new(hook));
        self
    }

    /// Opens the ledger, or makes it and its directory if there is none, and takes a slot for this
    /// process. Starts a thread that releases memory when other processes need it.
    ///
    /// # Errors
    /// [`LedgerError`] when a value is out of its range; when the name is empty, a number, or has
    /// control characters; when the ledger has another limit, a limit above the memory of the
    /// device that this process sees, or too little left for the guarantee; when the file is not a
    /// ledger of this device and version, or belongs to another user; when 128 processes use it;
    /// and when a system call fails.
    pub fn open(self) -> Result<Ledger, LedgerError> {
        let Self { device, .. } = self;
        device.own_process()?;
        let granule = device.granule();
        let total = device.total_memory();
        let kind = device.driver().kind();
        let set_by = |error: LedgerError| error.set_by(memory_option(kind));
        let path = self.directory.join(file_name(device.uuid()));
        // The path is used later too, when the working directory may have changed.
        let path = std::path::absolute(&path).unwrap_or(path);
        if let Some(limit) = self.limit {
            ArgumentError::at_least("bytes of a ledger's limit", limit, granule.bytes())?;
            joining::check_view(&path, limit, total).map_err(set_by)?;
        }
        let name = match self.name {
            Some(name) => joining::check_name(&name).map(|()| name)?,
            None => program(),
        };
        let most = granule.bytes().saturating_mul(MOST);
        ArgumentError::at_most("bytes of a device's memory", total, most)?;
        let what = "bytes of a process's guarantee";
        ArgumentError::at_most(what, self.guarantee, self.limit.unwrap_or(total))?;
        let process_limit = self.process_limit.unwrap_or(total);
        check_limit(process_limit, self.guarantee, granule.bytes())?;
        let terms = Terms {
            granule: granule.bytes(),
            device: device.uuid(),
            group: self.commands.group,
        };
        let wishes = Wishes {
            limit: self.limit.map(|limit| granule.round_down(limit)),
            default_limit: granule.round_down(total),
            process_limit,
            priority: self.priority,
            name,
            device: device.downgrade(),
            lingers: match kind {
                DriverKind::Cuda => dead::LINGERS,
                // Memory of the model and the host driver ends with its process.
                _ => Duration::ZERO,
            },
        };
        make_directory(&self.directory, self.commands.group)?;
        let member = Arc::new(Member::join(path, terms, &wishes).map_err(set_by)?);
        let commands = Arc::new(self.commands);
        keeper::start(&member, &commands)?;
        member.await_guarantee(self.guarantee, Instant::now().checked_add(self.timeout))?;
        if commands.remote > Remote::Nothing {
            let served = control::start(&member, commands)?;
            member.served.get_or_init(|| served);
        }
        Ok(Ledger {
            member,
            device: device.uuid(),
        })
    }
}

/// One budget of a device's memory for all processes that open it. See [the module](self).
///
/// A process leaves the ledger when the ledger, its clones and all pools that use it are dropped.
///
/// # Examples
/// ```rust
/// use cuvmm::{Device, Ledger, Pool};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let directory = directory.path();
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// let device = Device::open(opened.driver, 0)?;
/// let ledger = Ledger::builder(&device, directory)
///     .limit(512 << 20)
///     .guarantee(64 << 20)
///     .name("chat")
///     .open()?;
/// let pool = Pool::builder(&device).ledger(&ledger).build()?;
/// let block = pool.tenant("weights").register()?.allocate(100 << 20)?;
/// // Another process that opens the ledger gets what this one leaves.
/// assert_eq!(ledger.stats().processes[0].obtained, 100 << 20);
/// # drop(block);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Ledger {
    member: Arc<Member>,
    device: [u8; 16],
}

impl Drop for Ledger {
    fn drop(&mut self) {
        Member::leave_if_last(&self.member);
    }
}

impl Ledger {
    /// Returns a builder of the ledger of `device` in a directory that all processes share. The
    /// file's name is the device's UUID with [`FILE_ENDING`]. A slice of a GPU (MIG) has a UUID of
    /// its own (`cuDeviceGetUuid_v2`).
    pub fn builder(device: &Device, directory: impl Into<PathBuf>) -> LedgerBuilder<'_> {
        LedgerBuilder {
            device,
            directory: directory.into(),
            limit: None,
            guarantee: 0,
            process_limit: None,
            priority: 0,
            timeout: Duration::ZERO,
            name: None,
            commands: Commands::default(),
        }
    }

    /// Returns the path of the ledger's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.member.file().path()
    }

    /// Returns the figures of all processes.
    #[must_use]
    pub fn stats(&self) -> LedgerStats {
        stats::stats(
            self.member.file(),
            Some(self.member.index()),
            &mut Seen::default(),
        )
    }

    /// Returns what this process has released because requests of other processes lacked it.
    #[must_use]
    pub fn given(&self) -> GivenStats {
        self.member.given()
    }

    /// Returns the slot of this process, as in [`ProcessStats::slot`].
    #[must_use]
    pub fn slot(&self) -> usize {
        self.member.index()
    }

    /// Changes how much memory this process can always have, in bytes, rounded up to whole
    /// granules. A higher guarantee is charged at once.
    ///
    /// # Errors
    /// [`LedgerError::Argument`] when that is more than the limit of the process or the ledger, and
    /// [`LedgerError::Short`] when the ledger leaves too little; the guarantee is as before.
    pub fn set_guarantee(&self, bytes: u64) -> Result<(), LedgerError> {
        self.member.set_guarantee(bytes)
    }

    /// Changes how much memory this process may have at most, in bytes, rounded down to whole
    /// granules. Releases idle memory above the limit (`cuMemUnmap`, `cuMemRelease`). Returns the
    /// bytes that the process still holds beyond the limit; it is granted nothing until it holds
    /// less.
    ///
    /// # Errors
    /// [`LedgerError`] if the limit is less than the process's guarantee or than a granule.
    pub fn set_process_limit(&self, bytes: u64) -> Result<u64, LedgerError> {
        self.member.set_limit(bytes)
    }

    /// Changes the process's [priority](LedgerBuilder::priority).
    ///
    /// # Errors
    /// [`LedgerError::Call`] in a forked child.
    pub fn set_priority(&self, priority: i32) -> Result<(), LedgerError> {
        self.member.set_priority(priority)
    }

    pub(crate) const fn member(&self) -> &Arc<Member> {
        &self.member
    }

    pub(crate) const fn device(&self) -> [u8; 16] {
        self.device
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("path", &self.path())
            .field("slot", &self.slot())
            .finish()
    }
}

/// Returns the name of the file of a device's ledger.
#[must_use]
pub fn file_name(device: [u8; 16]) -> String {
    uuid(device) + FILE_ENDING
}

fn uuid(device: [u8; 16]) -> String {
    let hex: String = device.iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, rest) = hex.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("{a}-{b}-{c}-{d}-{e}")
}

/// Returns the name of the running program, or `program` if that name is none for a process.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match joining::check_name(&name) {
        Ok(()) => name.into_owned(),
        Err(_) => "program".to_owned(),
    }
}

fn make_directory(path: &Path, group: bool) -> Result<(), LedgerError> {
    let mode = if group { 0o770 } else { 0o700 };
    modes::make_directory(path, mode).map_err(|failed| LedgerError::System {
        call: failed.call,
        path: path.to_owned(),
        errno: failed.errno,
    })
}
