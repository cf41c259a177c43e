//! Blocks of shareable tags, offered and attached in one process over the stand-in for libcuda. The
//! Python package's tests have several processes.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io::{ErrorKind, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::{null, without_provenance_mut};

use crate::common::sharing::Sharing;
use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, over_the_stand_in};
use serde_json::{Value, json};

type OfferFn = unsafe extern "C" fn(*mut c_void, u64, *mut u64) -> c_int;
type HandlesFn = unsafe extern "C" fn(u64, *mut c_int, usize) -> c_int;
type ReceiveFn = unsafe extern "C" fn(*const c_char, *const c_int, usize, c_int, *mut u64) -> c_int;

struct Giving {
    tags: Tags,
    sharing: Sharing,
}

impl Giving {
    fn load() -> Self {
        let tags = Tags::load();
        let sharing = Sharing::of(tags.torch);
        Self { tags, sharing }
    }

    fn make_shareable(&self, tag: &str) -> Result<u64, (c_int, String)> {
        let make: unsafe extern "C" fn(*const c_char) -> c_int =
            self.tags.torch.function("cuvmm_tag_shareable");
        let tag = CString::new(tag).unwrap();
        // SAFETY: the text is terminated.
        self.sharing.outcome(unsafe { make(tag.as_ptr()) }, 0)
    }

    /// Offers memory. The error has the code 1 for memory that is no tag's.
    fn offer(&self, address: usize, size: u64) -> Result<u64, (c_int, String)> {
        let offer: OfferFn = self.tags.torch.function("cuvmm_offer");
        let mut number = 0;
        // SAFETY: the number can be written.
        let code = unsafe { offer(without_provenance_mut(address), size, &raw mut number) };
        self.sharing.outcome(code, number)
    }

    fn offered(&self, number: u64) -> Value {
        let ask: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize =
            self.tags.torch.function("cuvmm_offered");
        let mut text = vec![0_u8; 4096];
        // SAFETY: the buffer has this number of bytes.
        let length = unsafe { ask(number, text.as_mut_ptr().cast(), text.len()) };
        serde_json::from_slice(&text[..length - 1]).unwrap()
    }

    fn handles(&self, number: u64) -> Vec<OwnedFd> {
        let count = self.offered(number)["handles"].as_u64().unwrap();
        let mut handles = vec![-1; usize::try_from(count).unwrap()];
        let make: HandlesFn = self.tags.torch.function("cuvmm_offer_handles");
        // SAFETY: the numbers can be written, and the descriptors are new.
        unsafe {
            assert_eq!(make(number, handles.as_mut_ptr(), handles.len()), 0);
            assert_eq!(make(number, handles.as_mut_ptr(), 0), -1);
            handles
                .into_iter()
                .map(|it| OwnedFd::from_raw_fd(it))
                .collect()
        }
    }

    fn end(&self, number: u64) {
        let end: unsafe extern "C" fn(u64) = self.tags.torch.function("cuvmm_offer_end");
        // SAFETY: the number is passed by value.
        unsafe { end(number) };
    }

    fn receive(
        &self,
        request: &Value,
        handles: &[OwnedFd],
        giver: &UnixStream,
    ) -> Result<u64, (c_int, String)> {
        let receive: ReceiveFn = self.tags.torch.function("cuvmm_receive");
        let request = CString::new(request.to_string()).unwrap();
        let raw: Vec<c_int> = handles.iter().map(|it| it.as_raw_fd()).collect();
        let (place, count) = match raw.is_empty() {
            true => (null(), 0),
            false => (raw.as_ptr(), raw.len()),
        };
        let mut number = 0;
        // SAFETY: the text is terminated, and the descriptors are open.
        let code = unsafe {
            receive(
                request.as_ptr(),
                place,
                count,
                giver.as_raw_fd(),
                &raw mut number,
            )
        };
        self.sharing.outcome(code, number)
    }
}

fn request(size: usize, description: &Value) -> Value {
    json!({
        "key": "key", "device": 0, "offset": 0, "size": size, "read_only": false,
        "description": description,
    })
}

/// Returns what came over a socket: `None` if nothing did and it is open.
fn heard(mut socket: &UnixStream) -> Option<Vec<u8>> {
    socket.set_nonblocking(true).unwrap();
    let mut word = vec![];
    match socket.read_to_end(&mut word) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        outcome => outcome.map(|_| word).ok(),
    }
}

over_the_stand_in! {
    the_giver_hears_of_the_end [] says [] {
        a_giver_hears_of_the_end_behind_the_receivers_work();
    }

    an_offer_keeps_a_freed_block_and_is_one_for_the_block [] says [] {
        let (giving, cuda) = (Giving::load(), Cuda::load());
        giving.make_shareable("w").unwrap();
        let address = giving.tags.allocate("w", 6);
        let number = giving.offer(address, 6 << 20).unwrap();
        assert_eq!(giving.offer(address + MIB, 100), Ok(number));
        cuda.fill(address, 5, 6 * MIB, cuda.stream());
        giving.tags.free(address);
        let other = giving.tags.allocate("w", 6);
        assert_ne!(other, address);
        giving.end(number);
        // Once more was begun than ended.
        let handles = giving.handles(number);
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let description = giving.offered(number)["description"].clone();
        let attached = giving.receive(&request(6 * MIB, &description), &handles, &theirs).unwrap();
        let there = giving.sharing.describe(attached)["address"].as_u64().unwrap();
        cuda.expect(usize::try_from(there).unwrap(), 5, 6 * MIB);
        giving.end(number);
        giving.end(number);
        giving.sharing.detach(attached).unwrap();
        assert_ne!(giving.offer(other, 6 << 20), Ok(number));
    }

    what_is_not_shareable_is_not_offered [] says [] {
        let giving = Giving::load();
        let plain = giving.tags.allocate("plain", 6);
        giving.make_shareable("w").unwrap();
        let refused = |outcome: Result<u64, (c_int, String)>, text: &str| {
            let (code, error) = outcome.unwrap_err();
            assert!(code == -1 && error.contains(text), "{code}: {error}");
        };
        refused(giving.make_shareable("plain"), "has memory that is not shareable");
        refused(giving.offer(plain, 1), "\"plain\" is not shareable");
        let address = giving.tags.allocate("w", 6);
        refused(giving.offer(address, 7 << 20), "not all of it in one allocation");
        // Memory of no tag is the caller's matter.
        let outside = giving.tags.torch.malloc(1 << 20, giving_stream());
        assert_eq!(giving.offer(outside, 1).unwrap_err().0, 1);
        giving.tags.sleep("[\"w\"]", true).unwrap();
        refused(giving.offer(address, 1), "asleep");
        giving.tags.wake("[\"w\"]").unwrap();
        let number = giving.offer(address, 1).unwrap();
        let sleep = || giving.tags.sleep("[\"w\"]", true);
        let error = sleep().unwrap_err();
        assert!(error.contains("sent to other processes"), "{error}");
        giving.end(number);
        // What another process may have a handle of does not sleep.
        assert_eq!(sleep().unwrap_err(), error);
        // Without it the tag sleeps.
        giving.tags.free(address);
        giving.tags.torch.reset();
        giving.tags.allocate("w", 6);
        assert_eq!(sleep(), Ok(()));
    }

    forged_requests_attach_nothing [] says [] {
        let giving = Giving::load();
        giving.make_shareable("w").unwrap();
        let address = giving.tags.allocate("w", 6);
        let number = giving.offer(address, 6 << 20).unwrap();
        let (offered, handles) = (giving.offered(number), giving.handles(number));
        let description = offered["description"].as_str().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let try_it = |description: &str, handles: &[OwnedFd], offset: u64| {
            let mut request = request(6 * MIB, &description.into());
            request["offset"] = offset.into();
            giving.receive(&request, handles, &theirs).unwrap_err()
        };
        for (found, text) in [
            (try_it("zz", &handles, 0), "not UTF-8"),
            (try_it("", &handles, 0), "bytes"),
            (try_it(&description[2..], &handles, 0), "bytes"),
            (try_it(description, &handles[1..], 0), "handles"),
            (try_it(description, &handles, 1), "not all in a block of 6 MiB"),
            (try_it(description, &handles, u64::MAX), "not all in a block"),
        ] {
            assert!(found.1.contains(text), "{text}: {found:?}");
        }
        let wrong: Vec<OwnedFd> = handles.iter().map(|_| OwnedFd::from(UnixStream::pair().unwrap().0)).collect();
        assert_eq!(try_it(description, &wrong, 0).0, -1);
        // Nothing is mapped, and the socket is only the caller's.
        let ask = request(6 * MIB, &Value::Null);
        assert_eq!(giving.receive(&ask, &[], &theirs).unwrap_err().0, 1);
        drop(theirs);
        assert_eq!(heard(&ours), Some(vec![]));
        giving.end(number);
    }
}

// I-106: the giver hears that the memory is let go of only behind the work that uses it.
fn a_giver_hears_of_the_end_behind_the_receivers_work() {
    let (giving, cuda) = (Giving::load(), Cuda::load());
    let stream = cuda.stream();
    giving.make_shareable("w").unwrap();
    let address = giving.tags.allocate("w", 6);
    cuda.fill(address, 5, 6 * MIB, stream);
    let number = giving.offer(address, 6 << 20).unwrap();
    let offered = giving.offered(number);
    assert_eq!(offered["address"].as_u64(), Some(address as u64));
    let handles = giving.handles(number);
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Without a description only what is mapped is attached.
    let ask = request(6 * MIB, &Value::Null);
    assert_eq!(giving.receive(&ask, &[], &theirs).unwrap_err().0, 1);
    let first = request(6 * MIB, &offered["description"]);
    let first = giving.receive(&first, &handles, &theirs).unwrap();
    let (more_ours, more_theirs) = UnixStream::pair().unwrap();
    let second = giving.receive(&ask, &[], &more_theirs).unwrap();
    drop((theirs, more_theirs, handles));
    let there = giving.sharing.describe(first);
    assert_eq!(there["address"], giving.sharing.describe(second)["address"]);
    let there = usize::try_from(there["address"].as_u64().unwrap()).unwrap();
    cuda.expect(there, 5, 6 * MIB);
    let (_, sent_on) = giving.offer(there, 1).unwrap_err();
    assert!(sent_on.contains("clone()"), "{sent_on}");
    // The write is queued behind nothing that detaching does not wait for.
    cuda.fill(there, 9, 6 * MIB, stream);
    assert_eq!((heard(&ours), heard(&more_ours)), (None, None));
    giving.sharing.detach(first).unwrap();
    assert_eq!(heard(&ours), Some(b"L".to_vec()));
    // The other number keeps the mapping and its socket.
    assert_eq!(heard(&more_ours), None);
    cuda.expect(there, 9, 6 * MIB);
    giving.sharing.detach(second).unwrap();
    assert_eq!(heard(&more_ours), Some(b"L".to_vec()));
    assert_eq!(giving.receive(&ask, &[], &ours).unwrap_err().0, 1);
    cuda.expect(address, 9, 6 * MIB);
    giving.end(number);
}

fn giving_stream() -> crate::common::Handle {
    crate::common::default_stream(0)
}
