//! The threads of a publisher: one accepts readers, and each reader has one of its own.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::catalogue::{Shared, WakerGuard};
use super::channel::{Channel, Woken};
use super::listener::{FRESH, Listener};
use super::protocol::{MOST_LISTED, MOST_REQUEST, Reply, Request};
use super::system::failed;
use super::taking::take;
use super::wait::{Deadline, pause, wait_for};
use crate::descriptors::Spare;
use crate::error::{ChannelError, ShareError};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};

/// The pause after the system refused another connection.
const AGAIN: Duration = Duration::from_millis(50);

/// How long readers wait for descriptors of the process before they are refused.
const SHORT: Duration = Duration::from_secs(1);

/// Limits on the number of readers, and on their silence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The most readers, if this process may open enough files for them.
    pub(super) readers: usize,
    /// The longest silence before the first request.
    pub(super) at_first: Duration,
    /// The longest silence between two requests.
    pub(super) between: Duration,
}

impl Bounds {
    pub(super) const USUAL: Self = Self {
        readers: 1024,
        at_first: Duration::from_secs(10),
        between: Duration::from_secs(600),
    };

    /// Returns how many readers may be served now. Each has two descriptors while it waits, so half
    /// of the process's descriptors are left for handles and for the rest of the program.
    fn most(&self) -> usize {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let room = usize::try_from(files / 4).unwrap_or(usize::MAX);
        self.readers.min(room).max(1)
    }
}

/// Accepts readers until the publisher stops, then waits for their threads.
pub(super) fn accept_all(
    shared: &Arc<Shared>,
    (listener, mut spare): (&Listener, Spare),
    bounds: Bounds,
) {
    let mut serving: Vec<Reader> = vec![];
    let wanted = [
        (shared.stop.as_fd(), PollFlags::IN),
        (listener.as_fd(), PollFlags::IN),
    ];
    // Since when descriptors lack.
    let mut short_since = None;
    while !shared.stop.is_woken() {
        spare.keep();
        let waited = wait_for(&wanted, Some(Deadline::after(FRESH)));
        listener.refresh();
        serving
            .extract_if(.., |reader| reader.has_gone())
            .for_each(Reader::join);
        let came = match waited {
            Ok(ready) if ready.contains(&1) => accept(shared, listener, &serving, bounds),
            Ok(_) | Err(ChannelError::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        let is_short = matches!(&came, Err(error) if lacks_descriptors(error));
        short_since = is_short.then(|| short_since.unwrap_or_else(Instant::now));
        match came {
            Ok(reader) => serving.extend(reader),
            Err(error) => {
                if short_since.is_some_and(|since| since.elapsed() >= SHORT)
                    && spare.give_up()
                    && let Ok(Some(mut channel)) = listener.accept_now()
                {
                    channel.turn_away(&error);
                }
                if let Some(untold) = shared.log.admit(Instant::now()) {
                    log!(warn, %error, untold, "a reader was refused");
                }
                // The system is out of resources, and the next attempt would fail at once.
                if matches!(error, ChannelError::System { .. }) {
                    pause(AGAIN);
                }
            }
        }
    }
    serving.into_iter().for_each(Reader::join);
}

/// Accepts a waiting reader within the limits.
fn accept(
    shared: &Arc<Shared>,
    listener: &Listener,
    serving: &[Reader],
    bounds: Bounds,
) -> Result<Option<Reader>, ChannelError> {
    let Some(mut channel) = listener.accept_now()? else {
        return Ok(None);
    };
    let most = bounds.most();
    let share = (most / listener.users().count()).max(1);
    let uid = channel.peer().uid;
    let of_user = serving.iter().filter(|reader| reader.uid == uid).count();
    for (connected, most) in [(serving.len(), most), (of_user, share)] {
        if connected >= most {
            let busy = ChannelError::Busy { most };
            channel.turn_away(&busy);
            return Err(busy);
        }
    }
    let channel = channel.until(Arc::clone(&shared.stop));
    let reader = Reader::serve(Arc::clone(shared), channel, bounds);
    reader.map(Some).map_err(failed("starting a thread"))
}

/// Returns `true` if this process, or the system, may open no more descriptors.
const fn lacks_descriptors(error: &ChannelError) -> bool {
    matches!(
        error,
        ChannelError::System {
            errno: Errno::MFILE | Errno::NFILE,
            ..
        }
    )
}

struct Reader {
    thread: JoinHandle<()>,
    uid: u32,
    /// Set by the thread as it ends.
    gone: Arc<AtomicBool>,
}

impl Reader {
    fn serve(shared: Arc<Shared>, channel: Channel, bounds: Bounds) -> std::io::Result<Self> {
        let uid = channel.peer().uid;
        let gone = Arc::new(AtomicBool::new(false));
        let going = Gone(Arc::clone(&gone));
        let thread = thread::Builder::new()
            .name("cuvmm-reader".to_owned())
            .spawn(move || {
                let _going = going;
                serve(&shared, channel, bounds);
            })?;
        Ok(Self { thread, uid, gone })
    }

    fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn join(self) {
        if self.thread.join().is_err() {
            log!(error, "a reader's thread ended by a panic");
        }
    }
}

/// Marks a thread as ended when dropped, on every way out of the thread.
struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Serves one reader until it disconnects, makes an error or stays silent too long, or the
/// publisher stops.
fn serve(shared: &Shared, mut channel: Channel, bounds: Bounds) {
    let peer = channel.peer();
    let mut silence = bounds.at_first;
    loop {
        let answered = match channel.wait_with(shared.stop.as_fd(), silence) {
            Ok(Woken::Peer) => answer(shared, &mut channel),
            Ok(Woken::Other) => return,
            Err(error) => Err(error),
        };
        match answered {
            Ok(()) => silence = bounds.between,
            Err(ChannelError::Closed) => return,
            Err(error) => {
                if lacks_descriptors(&error) {
                    channel.turn_away(&error);
                }
                if let Some(untold) = shared.log.admit(Instant::now()) {
                    log!(warn, %error, pid = peer.pid, untold, "a reader was disconnected");
                }
                return;
            }
        }
    }
}

fn answer(shared: &Shared, channel: &mut Channel) -> Result<(), ChannelError> {
    let deadline = channel.deadline();
    match channel.hear(MOST_REQUEST, deadline)? {
        Request::List => channel.tell(&Reply::from(shared.list(MOST_LISTED)), deadline),
        Request::Attach { name } => {
            let Some(published) = shared.newest(&name) else {
                return channel.tell(&Reply::NotPublished, deadline);
            };
            let edition = (published.publisher, published.version());
            let is_in_place = published.is_in_place;
            channel.send_published(edition, is_in_place, &published.manifest, deadline)?;
            match channel.send_until(&published.offer, &published.description, deadline) {
                Ok(()) => Ok(()),
                Err(ShareError::Channel(error)) => Err(error),
                Err(error) => {
                    if let Some(untold) = shared.log.admit(Instant::now()) {
                        log!(warn, %error, name, untold, "a publication could not be sent to a reader");
                    }
                    Ok(())
                }
            }
        }
        Request::Watch {
            name,
            publisher,
            version,
            millis,
        } => {
            let seen = (publisher, version);
            let newest = watch(shared, channel, &name, seen, Duration::from_millis(millis))?;
            let deadline = channel.deadline();
            channel.tell(&newest, deadline)
        }
        Request::Keep { name, socket } => {
            let reply = match &shared.keeps {
                None => Reply::Refused(keeps_nothing()),
                Some(holdings) => match take(shared, holdings, &name, &socket) {
                    Ok(version) => Reply::Kept(version),
                    Err(error) => Reply::Refused(error.to_string()),
                },
            };
            let deadline = channel.deadline();
            channel.tell(&reply, deadline)
        }
        Request::Release { name, publisher } => {
            let reply = match &shared.keeps {
                None => Reply::Refused(keeps_nothing()),
                Some(_) => Reply::Released(shared.release(&name, publisher)),
            };
            channel.tell(&reply, deadline)
        }
    }
}

fn keeps_nothing() -> String {
    let pid = std::process::id();
    format!("process {pid} publishes and keeps nothing: a keeper listens at another socket")
}

/// Waits up to `time` until a name has another version than `seen`. Also returns when the reader
/// sends another request or the publisher stops.
fn watch(
    shared: &Shared,
    channel: &Channel,
    name: &str,
    seen: (u64, u64),
    time: Duration,
) -> Result<Reply, ChannelError> {
    let deadline = Deadline::after(time);
    let hung = WakerGuard::in_reach_of(shared)?;
    let wanted = [
        (hung.waker.as_fd(), PollFlags::IN),
        (channel.as_fd(), PollFlags::IN),
        (shared.stop.as_fd(), PollFlags::IN),
    ];
    loop {
        let newest = match shared.newest(name) {
            Some(published) => (published.publisher, published.version()),
            None => return Ok(Reply::NotPublished),
        };
        if seen != newest {
            return Ok(Reply::Newest(Some(newest.1)));
        }
        match wait_for(&wanted, Some(deadline)) {
            Ok(ready) if ready == [0] => hung.waker.silence(),
            Ok(ready) if ready.contains(&2) => return Err(ChannelError::Closed),
            Ok(_) | Err(ChannelError::TimedOut { .. }) => return Ok(Reply::Newest(None)),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::share::waker::Waker;

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(1);

    /// Stops a publisher's thread when dropped, also after a failed assertion.
    struct Over<'a>(&'a Waker);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.wake();
        }
    }

    fn beside(at_first: Duration, between: Duration, readers: usize, work: impl Fn(&Listener)) {
        let folder = tempfile::tempdir().unwrap();
        let listener = Arc::new(Listener::bind(folder.path().join("socket")).unwrap());
        let shared = Arc::new(Shared::new().unwrap());
        let bounds = Bounds {
            readers,
            at_first,
            between,
        };
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| accept_all(&shared, (&listener, Spare::new()), bounds));
            let over = Over(&shared.stop);
            work(&listener);
            drop(over);
            serving.join().unwrap();
        });
    }

    fn ask(channel: &mut Channel) -> Result<(), ChannelError> {
        let deadline = channel.deadline();
        channel.tell(&Request::List, deadline)?;
        channel.hear::<Reply>(MOST_REQUEST, deadline).map(drop)
    }

    fn is_closed(channel: &mut Channel) {
        let deadline = Deadline::after(Duration::from_secs(30));
        let heard = channel.hear::<Reply>(MOST_REQUEST, deadline);
        assert!(matches!(heard, Err(ChannelError::Closed)), "{heard:?}");
    }

    #[test]
    fn a_reader_that_never_asks_is_let_go() {
        beside(SHORT, LONG, 10, |listener| {
            is_closed(&mut Channel::connect(listener.path()).unwrap());
        });
    }

    #[test]
    fn a_reader_that_has_asked_may_be_silent_for_longer_and_not_for_ever() {
        beside(LONG, SHORT, 10, |listener| {
            let mut silent = Channel::connect(listener.path()).unwrap();
            let mut asks = Channel::connect(listener.path()).unwrap();
            ask(&mut asks).unwrap();
            is_closed(&mut asks);
            ask(&mut silent).unwrap();
        });
    }

    #[test]
    fn there_is_room_again_once_a_silent_reader_was_let_go() {
        beside(LONG, SHORT, 1, |listener| {
            let connect = || Channel::connect(listener.path()).unwrap();
            let mut served = std::iter::repeat_with(connect).filter_map(|mut channel| {
                // Refused while the previous reader is connected.
                ask(&mut channel).ok().map(|()| channel)
            });
            for _ in 0..3 {
                is_closed(&mut served.next().unwrap());
            }
        });
    }
}
