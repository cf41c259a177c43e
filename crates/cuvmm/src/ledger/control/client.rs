//! Requests to a process of a ledger.

mod together;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;

use super::timed::{Until, connect_to, receive, send};
use super::{GroupRequest, LONGEST_REPLY, ProcessReport, Reply, Request};
use crate::error::ControlError;
use crate::peer::peer_of;
use crate::wanted::Change;

/// The longest path of a Unix socket, without the zero at its end.
const LONGEST_SOCKET: usize = 107;

/// How much longer than the ranks of a group a program waits for their answers.
const BEYOND_RANKS: Duration = Duration::from_secs(1);

/// How long an answer may take by default.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process of a ledger, whose figures another program reads and whose terms it changes. Made by
/// [`LedgerView::control`](crate::LedgerView::control).
///
/// Each method makes one connection to the process's Unix socket. Limits and guarantees are those
/// that the process's own methods set; see [`Tenant::set_limit`](crate::Tenant::set_limit) and
/// [`Ledger::set_process_limit`](crate::Ledger::set_process_limit). The process refuses, with the
/// reason, whatever it does not allow and whatever its own methods refuse
/// ([`ControlError::Refused`](crate::error::ControlError::Refused)).
///
/// # Examples
/// ```rust
/// # use cuvmm::{Device, Ledger, LedgerView, Pool, driver::auto};
/// # let directory = tempfile::tempdir()?;
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// # let ledger = Ledger::builder(&device, directory.path()).limit(1 << 30).name("engine").open()?;
/// # let pool = Pool::builder(&device).ledger(&ledger).build()?;
/// # let tenant = pool.tenant("cache").register()?;
/// let view = LedgerView::open(ledger.path())?;
/// let engine = view.control(view.stats().processes[0].slot);
/// engine.set_limit(Some("cache"), 256 << 20)?;
/// assert_eq!(engine.report()?.pools[0].tenants[0].limit, 256 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Control {
    path: PathBuf,
    uid: u32,
    patience: Duration,
}

impl Control {
    pub(in crate::ledger) const fn new(path: PathBuf, uid: u32) -> Self {
        Self {
            path,
            uid,
            patience: PATIENCE,
        }
    }

    /// Sets how long an answer may take; 10 seconds by default. Sleep and wake of large models take
    /// longer.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.patience = timeout;
        self
    }

    /// Returns the figures of the process's pools and tenants.
    ///
    /// # Errors
    /// [`ControlError`] if the process does not serve requests or does not answer.
    pub fn report(&self) -> Result<ProcessReport, ControlError> {
        report_of(self.ask(&Request::Report)?)
    }

    /// Asks several processes at one time for the figures of their pools and tenants. Returns the
    /// answers in the same order. All share the `timeout`; their own timeouts do not count.
    ///
    /// # Errors
    /// A [`ControlError`] for each process that does not serve requests or does not answer.
    #[must_use]
    pub fn reports(
        processes: &[Self],
        timeout: Duration,
    ) -> Vec<Result<ProcessReport, ControlError>> {
        let answers = together::ask(processes, &Request::Report, timeout);
        let reports = answers.into_iter().map(|answer| report_of(answer?));
        reports.collect()
    }

    /// Asks all ranks of a group at one time to sleep or wake, and waits for all answers. `ranks` are
    /// their processes; their own timeouts do not count. Returns the answers in the same order.
    ///
    /// # Errors
    /// A [`ControlError`] for each process that refuses, does not serve requests or does not answer.
    /// A refusal has the reason, with the rank that is the cause; all ranks are then as before.
    #[must_use]
    pub fn group(ranks: &[Self], request: &GroupRequest) -> Vec<Result<(), ControlError>> {
        let timeout = request.timeout.saturating_add(BEYOND_RANKS);
        let answers = together::ask(ranks, &Request::Group(request.clone()), timeout);
        answers.into_iter().map(|it| done(it?).map(drop)).collect()
    }

    /// Changes the limit of a tenant, or of the process, in bytes. Returns the bytes still held
    /// beyond the limit.
    ///
    /// # Errors
    /// [`ControlError`] if the process refuses or does not answer.
    pub fn set_limit(&self, tenant: Option<&str>, bytes: u64) -> Result<u64, ControlError> {
        self.change(tenant, Change::Limit(bytes))
    }

    /// Changes the guarantee of a tenant, or of the process, in bytes.
    ///
    /// # Errors
    /// [`ControlError`] if the process refuses or does not answer.
    pub fn set_guarantee(&self, tenant: Option<&str>, bytes: u64) -> Result<(), ControlError> {
        self.change(tenant, Change::Guarantee(bytes)).map(drop)
    }

    /// Changes the priority of a tenant, or of the process.
    ///
    /// # Errors
    /// [`ControlError`] if the process refuses or does not answer.
    pub fn set_priority(&self, tenant: Option<&str>, priority: i32) -> Result<(), ControlError> {
        self.change(tenant, Change::Priority(priority)).map(drop)
    }

    /// Releases the process's idle memory to the driver until its pools hold at most `keep` bytes
    /// or no idle memory above guarantees is left. Returns the bytes that the process refunded.
    ///
    /// # Errors
    /// [`ControlError`] if the process refuses or does not answer.
    pub fn trim(&self, keep: u64) -> Result<u64, ControlError> {
        self.done(&Request::Trim { keep })
    }

    /// Makes the process put a tenant, or all of them, to sleep with the function that it set
    /// ([`LedgerBuilder::on_sleep`](crate::ledger::LedgerBuilder::on_sleep)).
    ///
    /// # Errors
    /// [`ControlError`] if the process has set none, refuses, or does not answer.
    pub fn sleep(&self, tenant: Option<&str>) -> Result<(), ControlError> {
        let tenant = tenant.map(str::to_owned);
        self.done(&Request::Sleep { tenant }).map(drop)
    }

    /// Makes the process wake a tenant, or all of them, with the function that it set
    /// ([`LedgerBuilder::on_wake`](crate::ledger::LedgerBuilder::on_wake)).
    ///
    /// # Errors
    /// [`ControlError`] if the process has set none, refuses, or does not answer.
    pub fn wake(&self, tenant: Option<&str>) -> Result<(), ControlError> {
        let tenant = tenant.map(str::to_owned);
        self.done(&Request::Wake { tenant }).map(drop)
    }

    fn change(&self, tenant: Option<&str>, change: Change) -> Result<u64, ControlError> {
        let tenant = tenant.map(str::to_owned);
        self.done(&Request::Change { tenant, change })
    }

    fn done(&self, request: &Request) -> Result<u64, ControlError> {
        done(self.ask(request)?)
    }

    fn ask(&self, request: &Request) -> Result<Reply, ControlError> {
        let failed = |error| self.failed(error, self.patience);
        let until = Until::after(self.patience);
        let stream = address(&self.path, |path| connect_to(path, until)).map_err(failed)?;
        self.check(&stream, self.patience)?;
        let reply = exchange(&stream, &line_of(request).map_err(failed)?, until).map_err(failed)?;
        reply_of(&reply)
    }

    /// Checks that the user of the slot serves the socket.
    fn check(&self, stream: &UnixStream, patience: Duration) -> Result<(), ControlError> {
        let served_by = peer_of(stream).map_err(|errno| self.failed(errno.into(), patience))?;
        match served_by.uid == self.uid {
            true => Ok(()),
            false => Err(ControlError::OtherUser { uid: served_by.uid }),
        }
    }

    fn failed(&self, error: io::Error, patience: Duration) -> ControlError {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ControlError::NotServed(self.path.clone())
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::TimedOut(patience),
            _ => ControlError::System {
                path: self.path.clone(),
                errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            },
        }
    }
}

fn line_of(request: &Request) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    Ok(line)
}

fn reply_of(line: &[u8]) -> Result<Reply, ControlError> {
    serde_json::from_slice(line).map_err(|error| malformed(&error.to_string()))
}

fn done(reply: Reply) -> Result<u64, ControlError> {
    match reply {
        Reply::Done(bytes) => Ok(bytes),
        Reply::Refused(reason) => Err(ControlError::Refused(reason)),
        Reply::Report(_) => Err(malformed("it is a report")),
    }
}

fn report_of(reply: Reply) -> Result<ProcessReport, ControlError> {
    match reply {
        Reply::Report(report) => Ok(report),
        Reply::Refused(reason) => Err(ControlError::Refused(reason)),
        Reply::Done(_) => Err(malformed("it is no report")),
    }
}

/// Sends a request and receives the answer. A process that refuses may close the connection before
/// it has read the request: sending then fails, and the answer says why.
fn exchange(stream: &UnixStream, line: &[u8], until: Until) -> io::Result<Vec<u8>> {
    let sent = send(stream, line, until);
    match (receive(stream, LONGEST_REPLY, until), sent) {
        (Ok(reply), Ok(())) => Ok(reply),
        (Ok(reply), Err(_)) if !reply.is_empty() => Ok(reply),
        (_, Err(error)) | (Err(error), Ok(())) => Err(error),
    }
}

fn malformed(reason: &str) -> ControlError {
    ControlError::Malformed(reason.to_owned())
}

/// Calls a function with the path of a socket, or with a shorter path of it if the path is too long
/// for the system.
pub(super) fn address<T>(path: &Path, call: impl Fn(&Path) -> io::Result<T>) -> io::Result<T> {
    if path.as_os_str().len() <= LONGEST_SOCKET {
        return call(path);
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return call(path);
    };
    let directory = File::open(directory)?;
    let short = format!("/proc/self/fd/{}", directory.as_raw_fd());
    call(&Path::new(&short).join(name))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn an_answer_is_read_that_came_before_the_request_was_sent() {
        let until = || Until::after(PATIENCE);
        let (stream, mut other) = UnixStream::pair().unwrap();
        other.write_all(b"it refuses\n").unwrap();
        drop(other);
        assert_eq!(exchange(&stream, b"x\n", until()).unwrap(), b"it refuses");
        let (stream, other) = UnixStream::pair().unwrap();
        drop(other);
        let error = exchange(&stream, b"x\n", until()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        // Data sent before the connection was closed, and not read.
        let (stream, mut other) = UnixStream::pair().unwrap();
        send(&stream, b"x", until()).unwrap();
        other.write_all(b"it refuses\n").unwrap();
        drop(other);
        assert_eq!(exchange(&stream, b"y\n", until()).unwrap(), b"it refuses");
    }
}
