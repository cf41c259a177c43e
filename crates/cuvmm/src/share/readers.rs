//! The threads that serve a publisher's readers: one accepts them, and each has one more.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;

use super::catalogue::{Hung, Shared};
use super::channel::{Channel, Woken};
use super::listener::Listener;
use super::protocol::{MOST_REQUEST, Reply, Request};
use super::wait::{Deadline, wait_for};
use crate::error::{ChannelError, GiveError};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};

/// How many readers may be connected at once.
const MOST_READERS: usize = 1024;

/// How long is waited where the system has no room for another connection.
const AGAIN: Duration = Duration::from_millis(50);

/// Accepts readers until it is over, and then waits for the threads that serve them.
pub(super) fn accept_all(shared: &Arc<Shared>, listener: &Listener) {
    let mut serving: Vec<Reader> = vec![];
    let wanted = [
        (shared.stop.as_fd(), PollFlags::IN),
        (listener.as_fd(), PollFlags::IN),
    ];
    loop {
        match wait_for(&wanted, None) {
            Ok(ready) if ready.contains(&0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::error!(%error, "a publisher cannot wait for readers any more");
                break;
            }
        }
        serving
            .extract_if(.., |reader| reader.has_gone())
            .for_each(Reader::join);
        let accepted = listener.accept_now();
        let spawned = accepted.and_then(|channel| {
            let Some(channel) = channel else {
                return Ok(None);
            };
            let most = serving.len();
            if most >= MOST_READERS {
                tracing::warn!(most, "a reader was turned away: there are so many");
                return Ok(None);
            }
            let channel = channel.until(Arc::clone(&shared.stop));
            Reader::serve(Arc::clone(shared), channel)
                .map(Some)
                .map_err(|_| ChannelError::Busy { most })
        });
        match spawned {
            Ok(thread) => serving.extend(thread),
            Err(ChannelError::NotAllowed { pid, uid }) => {
                tracing::warn!(pid, uid, "a reader was turned away");
            }
            Err(error) => {
                tracing::warn!(%error, "a reader was not served");
                // There may be no descriptors left, and then the next would fail at once.
                let pause = Deadline::after(AGAIN);
                drop(wait_for(&wanted[..1], Some(pause)));
            }
        }
    }
    serving.into_iter().for_each(Reader::join);
}

/// The thread that serves a reader.
struct Reader {
    thread: JoinHandle<()>,
    /// Said by the thread as it ends.
    gone: Arc<AtomicBool>,
}

impl Reader {
    fn serve(shared: Arc<Shared>, channel: Channel) -> std::io::Result<Self> {
        let gone = Arc::new(AtomicBool::new(false));
        let going = Gone(Arc::clone(&gone));
        let thread = thread::Builder::new()
            .name("cuvmm-reader".to_owned())
            .spawn(move || {
                let _going = going;
                serve(&shared, channel);
            })?;
        Ok(Self { thread, gone })
    }

    fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("a reader's thread ended by a panic");
        }
    }
}

/// Says that a thread has come to its end, however it has.
struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Answers one reader until it goes, does something wrong, or it is over.
fn serve(shared: &Shared, mut channel: Channel) {
    let peer = channel.peer();
    loop {
        match channel.wait_beside(shared.stop.as_fd()) {
            Ok(Woken::Peer) => {}
            Ok(Woken::Other) => return,
            Err(error) => {
                tracing::warn!(%error, pid = peer.pid, "a reader cannot be waited for");
                return;
            }
        }
        match answer(shared, &mut channel) {
            Ok(()) => {}
            Err(ChannelError::Closed) => return,
            Err(error) => {
                tracing::warn!(%error, pid = peer.pid, "a reader was let go");
                return;
            }
        }
    }
}

fn answer(shared: &Shared, channel: &mut Channel) -> Result<(), ChannelError> {
    let deadline = channel.deadline();
    match channel.hear(MOST_REQUEST, deadline)? {
        Request::List => channel.tell(&Reply::Publications(shared.list()), deadline),
        Request::Attach { name } => {
            let Some(edition) = shared.newest(&name) else {
                return channel.tell(&Reply::NotPublished, deadline);
            };
            let reply = Reply::Edition {
                publisher: shared.id,
                version: edition.version,
                manifest: edition.manifest.clone(),
            };
            channel.tell(&reply, deadline)?;
            match channel.give_before(&edition.offer, deadline) {
                Ok(()) => Ok(()),
                Err(GiveError::Channel(error)) => Err(error),
                Err(error) => {
                    tracing::warn!(%error, name, "a reader did not get what it asked for");
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
            let seen = (publisher == shared.id).then_some(version);
            let newest = watch(shared, channel, &name, seen, Duration::from_millis(millis))?;
            let deadline = channel.deadline();
            channel.tell(&newest, deadline)
        }
    }
}

/// Waits until a name has another edition than the one seen, for so long; or until the reader says
/// something else, or it is over.
fn watch(
    shared: &Shared,
    channel: &Channel,
    name: &str,
    seen: Option<u64>,
    time: Duration,
) -> Result<Reply, ChannelError> {
    let deadline = Deadline::after(time);
    let hung = Hung::in_reach_of(shared)?;
    let wanted = [
        (hung.bell.as_fd(), PollFlags::IN),
        (channel.as_fd(), PollFlags::IN),
        (shared.stop.as_fd(), PollFlags::IN),
    ];
    loop {
        let newest = match shared.newest(name) {
            Some(edition) => edition.version,
            None => return Ok(Reply::NotPublished),
        };
        if seen != Some(newest) {
            return Ok(Reply::Newest(Some(newest)));
        }
        match wait_for(&wanted, Some(deadline)) {
            Ok(ready) if ready == [0] => hung.bell.silence(),
            Ok(ready) if ready.contains(&2) => return Err(ChannelError::Closed),
            Ok(_) | Err(ChannelError::TimedOut { .. }) => return Ok(Reply::Newest(None)),
            Err(error) => return Err(error),
        }
    }
}
