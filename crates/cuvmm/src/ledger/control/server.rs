//! The thread that answers requests of other programs.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, listen, socket_with};

use super::super::member::Member;
use super::client::address;
use super::served::{Served, socket_path};
use super::timed::{Until, receive, send};
use super::{GroupRequest, LONGEST_REQUEST, ProcessReport, Remote, Reply, Request, pidfds};
use crate::error::LedgerError;
use crate::modes::{self, Failed};
use crate::peer::{Users, overflow_uid, peer_of};
use crate::wanted::Change;

/// How long a client may take to send its request, and to receive the answer.
const LONGEST_CLIENT: Duration = Duration::from_secs(1);

/// The most connections that wait for the thread.
const BACKLOG: i32 = 128;

pub(in crate::ledger) type Hook = Arc<dyn Fn(Option<&str>) -> Result<(), String> + Send + Sync>;

pub(in crate::ledger) type GroupHook =
    Arc<dyn Fn(&GroupRequest) -> Result<(), String> + Send + Sync>;

#[derive(Clone, Default)]
pub(in crate::ledger) struct Commands {
    pub(in crate::ledger) remote: Remote,
    pub(in crate::ledger) sleep: Option<Hook>,
    pub(in crate::ledger) wake: Option<Hook>,
    pub(in crate::ledger) on_group: Option<GroupHook>,
    pub(in crate::ledger) group: bool,
    pub(in crate::ledger) sleeps_for_others: bool,
    /// Held during a call of a function of the program.
    calling: Arc<Mutex<()>>,
}

impl Commands {
    /// Answers requests for figures only.
    pub(in crate::ledger) fn figures(group: bool) -> Self {
        Self {
            remote: Remote::Figures,
            group,
            ..Self::default()
        }
    }

    pub(in crate::ledger) fn sleep(&self, tenant: Option<&str>) -> Result<(), String> {
        let hook = self.sleep.as_ref();
        self.call(hook, "puts it to sleep", |hook| hook(tenant))
    }

    fn wake(&self, tenant: Option<&str>) -> Result<(), String> {
        self.call(self.wake.as_ref(), "wakes it", |hook| hook(tenant))
    }

    fn group(&self, request: &GroupRequest) -> Result<(), String> {
        let what = "puts groups to sleep and wakes them";
        self.call(self.on_group.as_ref(), what, |hook| hook(request))
    }

    fn call<H>(
        &self,
        hook: Option<&H>,
        what: &str,
        call: impl FnOnce(&H) -> Result<(), String>,
    ) -> Result<(), String> {
        let hook = hook.ok_or_else(|| format!("the process has set no function that {what}"))?;
        let _calling = self.calling.lock().unwrap_or_else(PoisonError::into_inner);
        let done = catch_unwind(AssertUnwindSafe(|| call(hook)));
        done.unwrap_or_else(|_| Err(format!("the process's function that {what} panicked")))
    }
}

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commands")
            .field("remote", &self.remote)
            .finish_non_exhaustive()
    }
}

struct Serving {
    member: Weak<Member>,
    commands: Arc<Commands>,
    listener: UnixListener,
    stop: UnixStream,
}

/// Starts the thread. The socket's name contains the file's number and the slot's generation, so it
/// is this member's alone.
pub(in crate::ledger) fn start(
    member: &Arc<Member>,
    commands: Arc<Commands>,
) -> Result<Served, LedgerError> {
    let path = socket_path(member.file(), member.index(), member.generation());
    let failed = |call| {
        let path = path.clone();
        move |error: io::Error| LedgerError::System {
            call,
            path,
            errno: Errno::from_io_error(&error).unwrap_or(Errno::INVAL),
        }
    };
    // A dead process whose ledger file had this file's number may have left a socket.
    let _ = fs::remove_file(&path);
    let mode = if commands.group { 0o660 } else { 0o600 };
    let listener = address(&path, |path| Ok(listen_at(path, mode))).map_err(failed("open"))?;
    let listener = listener.map_err(|at| failed(at.call)(at.errno.into()))?;
    let (stop, stopped) = UnixStream::pair().map_err(failed("socketpair"))?;
    let serving = Serving {
        member: Arc::downgrade(member),
        commands,
        listener,
        stop: stopped,
    };
    let started = std::thread::Builder::new()
        .name("cuvmm-control".into())
        .spawn(move || serving.run());
    started.map_err(|error| {
        LedgerError::Thread(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
    })?;
    Ok(Served { stop, path })
}

fn listen_at(path: &Path, mode: u32) -> Result<UnixListener, Failed> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None).map_err(Failed::of("socket"))?;
    let address = SocketAddrUnix::new(path).map_err(Failed::of("bind"))?;
    modes::bind(&socket, &address, path, mode)?;
    listen(&socket, BACKLOG).map_err(Failed::of("listen"))?;
    Ok(socket.into())
}

impl Serving {
    fn run(self) {
        loop {
            let mut polled = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    log!(warn, %errno, "requests to this process are answered no more");
                    return;
                }
            }
            if !polled[1].revents().is_empty() {
                return;
            }
            match self.listener.accept() {
                Ok((client, _)) => self.serve(&client),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    log!(debug, %error, "a connection could not be accepted");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn serve(&self, client: &UnixStream) {
        let reply = match self.request(client) {
            Ok(Request::Pidfd) => {
                if let Err(error) = pidfds::give_own(client) {
                    log!(debug, %error, "a process did not receive a pidfd of this one");
                }
                return;
            }
            Ok(request) => self.answer(request).unwrap_or_else(Reply::Refused),
            Err(reason) => Reply::Refused(reason),
        };
        let sent = serde_json::to_vec(&reply).map_err(io::Error::from);
        let sent = sent.and_then(|mut line| {
            line.push(b'\n');
            send(client, &line, Until::after(LONGEST_CLIENT))
        });
        if let Err(error) = sent {
            log!(debug, %error, "a client did not receive its answer");
        }
    }

    fn request(&self, client: &UnixStream) -> Result<Request, String> {
        if self.commands.group {
            let uid = peer_of(client).map_err(|errno| errno.to_string())?.uid;
            if uid == overflow_uid() {
                return Err(format!("user {uid} stands for every unknown user"));
            }
        } else {
            let admitted = Users::own().admit(client);
            admitted.map_err(|error| error.to_string())?;
        }
        let line = receive(client, LONGEST_REQUEST, Until::after(LONGEST_CLIENT));
        let line = line.map_err(|error| error.to_string())?;
        serde_json::from_slice(&line).map_err(|error| format!("this is not a request: {error}"))
    }

    fn answer(&self, request: Request) -> Result<Reply, String> {
        let member = self.member.upgrade();
        let member = member.ok_or("the process is leaving the ledger")?;
        if self.commands.remote < Remote::Changes && request != Request::Report {
            return Err("the process does not allow changes by other programs".to_owned());
        }
        match request {
            Request::Report => Ok(Reply::Report(report(&member))),
            Request::Pidfd => Err("a pidfd is sent beside an answer".to_owned()),
            Request::Change {
                tenant: None,
                change,
            } => change_process(&member, change).map(Reply::Done),
            Request::Change {
                tenant: Some(tenant),
                change,
            } => change_tenant(&member, &tenant, change).map(Reply::Done),
            Request::Trim { keep } => Ok(Reply::Done(member.give_back_to(keep))),
            Request::Group(request) => self.commands.group(&request).map(|()| Reply::Done(0)),
            Request::Sleep { tenant } => {
                check_tenant(&member, tenant.as_deref())?;
                let done = self.commands.sleep(tenant.as_deref());
                done.map(|()| Reply::Done(0))
            }
            Request::Wake { tenant } => {
                check_tenant(&member, tenant.as_deref())?;
                let done = self.commands.wake(tenant.as_deref());
                done.map(|()| Reply::Done(0))
            }
        }
    }
}

/// Returns the figures of the pools, with the limit of each tenant that holds.
fn report(member: &Member) -> ProcessReport {
    let mut pools = Vec::new();
    member.givers().each(|giver| pools.push(giver.report()));
    let limit = member.limit();
    for pool in &mut pools {
        for tenant in &mut pool.tenants {
            tenant.limit = tenant.limit.min(pool.limit).min(limit);
        }
    }
    ProcessReport { pools }
}

fn change_process(member: &Member, change: Change) -> Result<u64, String> {
    let changed = match change {
        Change::Limit(bytes) => member.set_limit(bytes),
        Change::Guarantee(bytes) => member.set_guarantee(bytes).map(|()| 0),
        Change::Priority(priority) => member.set_priority(priority).map(|()| 0),
    };
    changed.map_err(|error| error.to_string())
}

/// Refuses a tenant that no pool has. Returns the number of pools that have it.
fn check_tenant(member: &Member, tenant: Option<&str>) -> Result<u32, String> {
    let Some(tenant) = tenant else {
        return Ok(0);
    };
    let mut holders = 0;
    let has = |report: super::PoolReport| {
        let mut tenants = report.tenants.iter();
        tenants.any(|it| !it.draining && it.name == tenant)
    };
    member
        .givers()
        .each(|giver| holders += u32::from(has(giver.report())));
    match holders {
        0 => Err(no_tenant(member, tenant)),
        _ => Ok(holders),
    }
}

/// Returns the refusal of a tenant that no pool has, with the names of some that pools have.
fn no_tenant(member: &Member, tenant: &str) -> String {
    const MOST_NAMES: usize = 8;
    let mut names = BTreeSet::new();
    member.givers().each(|giver| {
        let tenants = giver.report().tenants.into_iter();
        names.extend(tenants.filter(|it| !it.draining).map(|it| it.name));
    });
    let more = names.len().saturating_sub(MOST_NAMES);
    let names: Vec<_> = names
        .iter()
        .take(MOST_NAMES)
        .map(|name| format!("{name:?}"))
        .collect();
    let there = match (names.is_empty(), more) {
        (true, _) => "there is none".to_owned(),
        (false, 0) => format!("there are {}", names.join(", ")),
        (false, more) => format!("there are {} and {more} more", names.join(", ")),
    };
    format!("no tenant is named {tenant:?}: {there}")
}

fn change_tenant(member: &Member, tenant: &str, change: Change) -> Result<u64, String> {
    let holders = check_tenant(member, Some(tenant))?;
    if holders > 1 {
        return Err(format!("{holders} pools have a tenant named {tenant:?}"));
    }
    let mut outcome = Err(no_tenant(member, tenant));
    member.givers().each(|giver| {
        if let Some(changed) = giver.change(tenant, change) {
            outcome = changed;
        }
    });
    outcome
}
