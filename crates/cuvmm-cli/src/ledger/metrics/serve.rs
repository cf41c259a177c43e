//! Serves the figures at an address, to any number of clients.
//!
//! One thread polls all connections, and no client can stop it. Each connection has a deadline for
//! sending its request and one for receiving the answer. The number of connections is capped: at
//! the cap, a new connection replaces the one with the nearest deadline, so a client that asks at
//! once is answered even if all others are idle.
//!
//! No HTTP library is used: a scraper needs one request line and one answer, and the deadlines and
//! the cap need control of each connection.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cuvmm::LedgerView;
use cuvmm::ledger::open_metrics;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::connection::{Answer, Connection, plain};
use super::listen::Listener;
use crate::ledger::find::Where;
use cuvmm_command::terminal::tell;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The most connections at one time, and the fraction of the process's descriptors that they may
/// take: the ledgers and their control connections need some too.
const MOST: u64 = 64;
const PART: u64 = 4;

/// The pause in accepting after the system has refused a connection for lack of descriptors or
/// memory although no connection is open.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves the figures until the system fails.
///
/// # Errors
/// A failure of the system that no single connection causes.
pub(super) fn serve(listener: &Listener, at: &Where) -> anyhow::Result<Infallible> {
    let mut server = Server {
        listener,
        figures: Figures {
            at,
            views: Vec::new(),
            told: BTreeSet::new(),
        },
        connections: Vec::new(),
        most: most(),
        paused: None,
    };
    loop {
        server.turn().context("figures can no longer be served")?;
    }
}

fn most() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most = (descriptors / PART).clamp(1, MOST);
    usize::try_from(most).unwrap_or(1)
}

struct Server<'a> {
    listener: &'a Listener,
    figures: Figures<'a>,
    connections: Vec<Connection>,
    most: usize,
    paused: Option<Instant>,
}

impl Server<'_> {
    fn turn(&mut self) -> io::Result<()> {
        let ready = self.wait()?;
        let now = Instant::now();
        self.paused = self.paused.filter(|&until| until > now);
        let (accepts, ready) = ready.split_first().unwrap_or((&false, &[]));
        let each = self.connections.iter_mut().zip(ready);
        each.for_each(|(connection, &ready)| match ready {
            true => connection.go_on(now),
            false if connection.until <= now => connection.expire(now),
            false => {}
        });
        if *accepts {
            self.accept(now)?;
        }
        self.answer();
        self.connections.retain(|it| !it.is_closed());
        Ok(())
    }

    /// Waits until a descriptor is ready or a deadline has come. Returns whether the listener
    /// (first) and each connection are ready.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let events = match self.paused {
            Some(_) => PollFlags::empty(),
            None => PollFlags::IN,
        };
        let listener = PollFd::new(self.listener, events);
        let connections = self.connections.iter();
        let connections = connections.map(|it| PollFd::new(it, it.events()));
        let mut polled: Vec<PollFd<'_>> = std::iter::once(listener).chain(connections).collect();
        let deadlines = self.connections.iter().map(|it| it.until);
        let next = deadlines.chain(self.paused).min();
        let left = next.map(|next| next.saturating_duration_since(Instant::now()));
        // The system's clock may lag by less than a millisecond.
        let left = left.map(|left| left + Duration::from_millis(1));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut polled, left.as_ref()) {
            Ok(_) => Ok(polled.iter().map(|it| !it.revents().is_empty()).collect()),
            Err(Errno::INTR) => Ok(vec![false; polled.len()]),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Accepts waiting connections, at most `most` in one turn.
    fn accept(&mut self, now: Instant) -> io::Result<()> {
        for _ in 0..self.most {
            match self.listener.accept() {
                Ok(socket) => {
                    self.connections.retain(|it| !it.is_closed());
                    if self.connections.len() >= self.most {
                        self.close_one();
                    }
                    let mut connection = Connection::new(socket, now);
                    // Most clients have already sent their requests.
                    connection.go_on(now);
                    self.connections.push(connection);
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => return Ok(()),
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        if !self.close_half() {
                            self.paused = Some(now + PAUSE);
                            return Ok(());
                        }
                    }
                    // Errors of one connection: it has ended, or a firewall refused it.
                    Some(
                        Errno::CONNABORTED
                        | Errno::PROTO
                        | Errno::PERM
                        | Errno::NETDOWN
                        | Errno::NETUNREACH
                        | Errno::HOSTUNREACH
                        | Errno::TIMEDOUT,
                    ) => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Closes the connection with the nearest deadline. Returns `false` if there is none.
    fn close_one(&mut self) -> bool {
        let idle = self.connections.iter().enumerate();
        let idle = idle.filter(|(_, it)| !it.asks());
        let next = idle.min_by_key(|(_, it)| it.until).map(|(at, _)| at);
        if let Some(next) = next {
            self.connections.remove(next);
        }
        next.is_some()
    }

    /// Closes half of the connections and lowers the cap to as many, to free descriptors for
    /// reading the figures. Returns `false` if there is no connection.
    fn close_half(&mut self) -> bool {
        self.most = (self.connections.len() / 2).max(1);
        let mut closed = false;
        while self.connections.len() >= self.most && self.close_one() {
            closed = true;
        }
        closed
    }

    /// Reads the figures once for all clients that await them.
    fn answer(&mut self) {
        if !self.connections.iter().any(Connection::asks) {
            return;
        }
        let text = self.figures.read();
        let answer = match &text {
            Ok(text) => Answer {
                status: "200 OK",
                content_type: CONTENT_TYPE,
                body: text,
            },
            Err(error) => plain("500 Internal Server Error", error),
        };
        // Deadlines count from here: reading the figures took time.
        let now = Instant::now();
        let connections = self.connections.iter_mut();
        connections.for_each(|it| it.answer(&answer, now));
    }
}

/// The ledgers. They stay open because an open view notices stopped processes.
struct Figures<'a> {
    at: &'a Where,
    views: Vec<LedgerView>,
    /// The last printed errors of files.
    told: BTreeSet<String>,
}

impl Figures<'_> {
    fn read(&mut self) -> Result<String, String> {
        let opened = self.at.open_again(std::mem::take(&mut self.views));
        let opened = opened.map_err(|error| format!("{error}\n"))?;
        self.views = opened.ledgers;
        let wrong = BTreeSet::from_iter(opened.wrong);
        wrong.difference(&self.told).for_each(|wrong| tell(wrong));
        self.told = wrong;
        Ok(open_metrics(&self.views))
    }
}
