//! The history of allocations, the observer of shortages and reports to PyTorch's profiler, over the
//! stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions, and to be Python for it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::common::{Cuda, MIB, Torch, in_a_child, over_the_stand_in};
use serde_json::Value;

type Begin = unsafe extern "C" fn(u64, c_int, c_int, *const Python) -> c_int;
type TagMalloc = unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
type TagFree = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);

/// The functions of Python's C interface, in the library's order.
#[repr(C)]
struct Python {
    current: extern "C" fn() -> usize,
    own: extern "C" fn() -> usize,
    lock: extern "C" fn() -> c_int,
    unlock: extern "C" fn(c_int),
    collector_off: extern "C" fn() -> c_int,
    collector_on: extern "C" fn() -> c_int,
    take_error: extern "C" fn(*mut usize, *mut usize, *mut usize),
    put_error: extern "C" fn(usize, usize, usize),
    frame: extern "C" fn() -> usize,
    back: extern "C" fn(usize) -> usize,
    code: extern "C" fn(usize) -> usize,
    line: extern "C" fn(usize) -> c_int,
    attribute: extern "C" fn(usize, *const c_char) -> usize,
    text: extern "C" fn(usize) -> *const c_char,
    retain: extern "C" fn(usize),
    drop: extern "C" fn(usize),
}

thread_local! {
    /// `true` while this thread has Python's lock.
    static HAS_LOCK: Cell<bool> = const { Cell::new(false) };
    /// `true` if this thread has a state of Python.
    static IS_PYTHON: Cell<bool> = const { Cell::new(false) };
}

/// How often Python's lock was waited for.
static WAITS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn current() -> usize {
    usize::from(HAS_LOCK.get())
}

extern "C" fn own() -> usize {
    usize::from(IS_PYTHON.get())
}

/// Waits for another thread that has the lock meanwhile, and uses the library.
extern "C" fn lock() -> c_int {
    WAITS.fetch_add(1, Ordering::Relaxed);
    let other = std::thread::spawn(|| {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let address = torch.malloc(512, stream);
        torch.free(address, stream);
        torch.reset();
        torch.text("cuvmm_snapshot");
        torch.text("cuvmm_history");
    });
    other.join().unwrap();
    HAS_LOCK.set(true);
    1
}

extern "C" fn unlock(_: c_int) {
    HAS_LOCK.set(false);
}

extern "C" fn collector_off() -> c_int {
    0
}

extern "C" fn collector_on() -> c_int {
    unreachable!("the collector was off before");
}

extern "C" fn take_error(_: *mut usize, _: *mut usize, _: *mut usize) {}

extern "C" fn put_error(_: usize, _: usize, _: usize) {}

/// Frames are the numbers 1 and 2, whose code is the same numbers plus 10.
extern "C" fn frame() -> usize {
    assert!(HAS_LOCK.get());
    1
}

extern "C" fn back(frame: usize) -> usize {
    if frame == 1 { 2 } else { 0 }
}

extern "C" fn code(frame: usize) -> usize {
    frame + 10
}

extern "C" fn line(frame: usize) -> c_int {
    c_int::try_from(frame).unwrap() * 100
}

/// Attributes are 20 for the names of functions, 30 for files, and nothing for the outer frame's file.
extern "C" fn attribute(code: usize, name: *const c_char) -> usize {
    // SAFETY: the library passes a text.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    match (code, name.to_str().unwrap()) {
        (11 | 12, "co_name") => 20,
        (11, "co_filename") => 30,
        (12, "co_filename") => 0,
        other => panic!("{other:?}"),
    }
}

extern "C" fn text(object: usize) -> *const c_char {
    match object {
        20 => c"step".as_ptr(),
        30 => c"a\tfile\n.py".as_ptr(),
        other => panic!("{other}"),
    }
}

extern "C" fn retain(_: usize) {}

static PYTHON: Python = Python {
    current,
    own,
    lock,
    unlock,
    collector_off,
    collector_on,
    take_error,
    put_error,
    frame,
    back,
    code,
    line,
    attribute,
    text,
    retain,
    drop: retain,
};

/// The stack of every thread that has Python's lock.
const STACK: &str = "100\tstep\ta file .py\n200\tstep\t?\n";

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

fn begin(torch: &Torch, events: u64, stacks: c_int, clear: bool) -> c_int {
    let begin: Begin = torch.function("cuvmm_history_begin");
    // SAFETY: the functions stay.
    unsafe { begin(events, stacks, c_int::from(clear), &raw const PYTHON) }
}

fn end(torch: &Torch) {
    let end: unsafe extern "C" fn() = torch.function("cuvmm_history_end");
    // SAFETY: it may be called at any time.
    unsafe { end() }
}

fn history(torch: &Torch) -> Value {
    serde_json::from_str(&torch.text("cuvmm_history")).unwrap()
}

/// Returns kind, address and bytes of all events of device 0.
fn events(torch: &Torch) -> Vec<(String, u64, u64)> {
    let history = history(torch);
    let events = history["events"].as_array().unwrap().iter();
    let events = events.map(|event| {
        let number = |at: usize| event[1][at].as_u64().unwrap();
        (event[0].as_str().unwrap().to_owned(), number(0), number(1))
    });
    events.collect()
}

fn kinds(torch: &Torch) -> Vec<String> {
    events(torch).into_iter().map(|it| it.0).collect()
}

// I-115
fn pythons_lock_is_waited_for_with_no_lock_held() {
    let (torch, cuda) = (Torch::load(), Cuda::load());
    let stream = cuda.stream();
    let tag_malloc: TagMalloc = torch.function("cuvmm_tag_malloc");
    let tag_free: TagFree = torch.function("cuvmm_tag_free");
    torch.free(torch.malloc(512, stream), stream);
    assert_eq!(begin(&torch, 1000, 2, false), 0);
    let stacks = |torch: &Torch| {
        let history = history(torch);
        let events = history["events"].as_array().unwrap().iter();
        let stacks = events.map(|it| (it[0].as_str().unwrap().to_owned(), it[2].is_u64()));
        stacks.collect::<Vec<_>>()
    };
    let event = |kind: &str, has_stack: bool| (kind.to_owned(), has_stack);
    // A thread without Python has no stack.
    torch.free(torch.malloc(512, stream), stream);
    assert_eq!(
        stacks(&torch),
        [event("alloc", false), event("free", false)]
    );
    // One that has let go of the lock waits for it, while another uses the library.
    IS_PYTHON.set(true);
    assert_eq!(begin(&torch, 1000, 2, true), 0);
    torch.free(torch.malloc(512, stream), stream);
    assert_eq!(WAITS.load(Ordering::Relaxed), 2);
    let seen = stacks(&torch)
        .into_iter()
        .filter(|it| it.1)
        .collect::<Vec<_>>();
    assert_eq!(seen, [event("alloc", true), event("free", true)]);
    assert_eq!(history(&torch)["stacks"], serde_json::json!([STACK]));
    // Not where PyTorch holds locks, nor in an open pool.
    assert_eq!(begin(&torch, 1000, 2, true), 0);
    // SAFETY: the size is one, and the address is what it returns.
    unsafe { tag_free(tag_malloc(512, 0, null_mut()), 512, 0, null_mut()) };
    let open: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
        torch.function("cuvmm_begin_allocate_to_pool");
    let close: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
    // SAFETY: a null function accepts all streams.
    unsafe { open(0, [0, 7], null()) };
    let pooled = torch.malloc(512, stream);
    // SAFETY: it may be called at any time.
    unsafe { close(0, [0, 7]) };
    assert_eq!(WAITS.load(Ordering::Relaxed), 2);
    assert_eq!(
        stacks(&torch),
        [
            event("alloc", false),
            event("free", false),
            event("alloc", false)
        ]
    );
    // With the lock there is nothing to wait for.
    HAS_LOCK.set(true);
    // SAFETY: the size is one, and the address is what it returns.
    unsafe { tag_free(tag_malloc(512, 0, null_mut()), 512, 0, null_mut()) };
    assert_eq!(
        stacks(&torch)[3..],
        [event("alloc", true), event("free", true)]
    );
    HAS_LOCK.set(false);
    // Not once the interpreter ends.
    let collector: unsafe extern "C" fn(*const c_void) = torch.function("cuvmm_set_collector");
    // SAFETY: there was none.
    unsafe { collector(null()) };
    torch.free(pooled, stream);
    assert_eq!(stacks(&torch)[5..], [event("free", false)]);
    assert_eq!(WAITS.load(Ordering::Relaxed), 2);
}

over_the_stand_in! {
    events_are_kept_in_order_and_only_so_many [] says [
        "allocation of 512 MiB on device 0 failed: out of memory",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let early = torch.malloc(size(3 * MIB), stream);
        assert_eq!(torch.text("cuvmm_history"), "", "nothing is recorded");
        for stacks in [-1, 3] {
            assert_eq!(begin(&torch, 10, stacks, false), -1);
            assert!(torch.last_error().contains("must be 0, 1 or 2"), "{}", torch.last_error());
        }
        assert_eq!(torch.text("cuvmm_history"), "");
        assert_eq!(begin(&torch, 4, 2, false), 0);
        let first = torch.malloc(1000, stream);
        assert_eq!(torch.malloc(size(512 * MIB), stream), 0);
        torch.free(early, stream);
        let number = |address: usize| address as u64;
        let free = events(&torch)[1].1;
        assert_eq!(events(&torch), [
            ("alloc".to_owned(), number(first), 1024),
            ("oom".to_owned(), free, 512 << 20),
            ("free".to_owned(), number(early), 3 << 20),
        ]);
        assert!((1 << 20..256 << 20).contains(&free), "{free}");
        let last = &history(&torch)["events"][2];
        assert_eq!(last[1][2].as_u64().unwrap(), stream.addr() as u64);
        assert_eq!(last[1][3].as_u64().unwrap(), torch.figure("held"));
        assert!(last[2].is_null(), "no Python runs here");
        torch.free(first, stream);
        let again = torch.malloc(1000, stream);
        assert_eq!(kinds(&torch), ["oom", "free", "free", "alloc"]);
        assert_eq!(begin(&torch, 2, 0, false), 0);
        assert_eq!(kinds(&torch), ["free", "alloc"]);
        assert_eq!(begin(&torch, 2, 0, true), 0);
        assert_eq!(kinds(&torch), <[&str; 0]>::default());
        // Without events, stacks of what is live are kept.
        HAS_LOCK.set(true);
        IS_PYTHON.set(true);
        assert_eq!(begin(&torch, 0, 1, true), 0);
        let live = torch.malloc(512, stream);
        let found = history(&torch);
        assert_eq!(found["live"], serde_json::json!([[live, 0]]));
        assert_eq!(found["stacks"], serde_json::json!([STACK]));
        assert_eq!(found["events"], serde_json::json!([]));
        torch.free(live, stream);
        assert_eq!(history(&torch)["live"], serde_json::json!([]));
        end(&torch);
        assert_eq!(torch.text("cuvmm_history"), "");
        torch.free(again, stream);
        assert_eq!(torch.text("cuvmm_history"), "");
        // A child that was forked neither records nor reports.
        assert_eq!(begin(&torch, 9, 2, false), 0);
        let alone = || begin(&torch, 9, 2, false) == -1 && torch.text("cuvmm_history").is_empty();
        assert_eq!(in_a_child(|| c_int::from(!alone())), 0);
    }

    what_sleeps_counts_as_freed [] says [] {
        let tags = crate::common::tags::Tags::load();
        let torch = tags.torch;
        let tag_malloc: TagMalloc = torch.function("cuvmm_tag_malloc");
        // The device has a heap.
        tags.allocate("other", 2);
        assert_eq!(begin(&torch, 100, 0, false), 0);
        let weights = tags.allocate("weights", 6);
        tags.sleep(r#"["weights"]"#, true).unwrap();
        tags.wake(r#"["weights"]"#).unwrap();
        tags.sleep(r#"["weights"]"#, true).unwrap();
        tags.free(weights);
        let found = events(&torch);
        let kinds: Vec<_> = found.iter().map(|it| &*it.0).collect();
        assert_eq!(kinds, ["alloc", "sleep", "wake", "sleep", "free_asleep"]);
        assert!(found.iter().all(|it| (it.1, it.2) == (weights as u64, 6 << 20)), "{found:?}");
        // SAFETY: the size is one.
        let plain = unsafe { tag_malloc(4096, 0, null_mut()) };
        assert_eq!(events(&torch).last().unwrap().0, "alloc");
        tags.free(plain.addr());
        assert_eq!(events(&torch).last().unwrap().0, "free");
    }

    uses_of_an_address_alternate_on_many_threads [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream().addr();
        torch.free(torch.malloc(size(64 * MIB), std::ptr::without_provenance_mut(stream)),
            std::ptr::without_provenance_mut(stream));
        assert_eq!(begin(&torch, u64::MAX, 0, false), 0);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                scope.spawn(move || {
                    let torch = Torch::load();
                    let stream = std::ptr::without_provenance_mut(stream);
                    for round in 0..300 {
                        let first = torch.malloc(size(512 << ((round + thread) % 4)), stream);
                        let second = torch.malloc(512, stream);
                        torch.free(first, stream);
                        torch.free(second, stream);
                    }
                });
            }
        });
        let mut live = BTreeMap::new();
        let all = events(&torch);
        assert_eq!(all.len(), 4 * 300 * 4);
        for (kind, address, bytes) in all {
            match &*kind {
                "alloc" => {
                    let before = live.range(..address).next_back();
                    assert!(before.is_none_or(|(at, bytes)| at + bytes <= address));
                    let next = live.range(address..).next();
                    assert!(next.is_none_or(|(&at, _)| address + bytes <= at));
                    live.insert(address, bytes);
                }
                "free" => assert_eq!(live.remove(&address), Some(bytes)),
                other => panic!("{other}"),
            }
        }
        assert!(live.is_empty());
    }

    a_stack_waits_for_pythons_lock_before_all_others [] says [] {
        pythons_lock_is_waited_for_with_no_lock_held();
    }

    the_observer_hears_of_shortages_with_no_lock_held ["CUVMM_TORCH_LIMIT" = "100MiB"] says [
        "allocation of 300 MiB on device 0 failed: out of memory",
        "allocation of 200 MiB on device 0 failed: out of memory",
        "allocation of 200 MiB on device 0 failed: out of memory",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let set: unsafe extern "C" fn(Option<unsafe extern "C" fn(c_int, u64, u64, u64)>) =
            torch.function("cuvmm_set_observer");
        static HEARD: AtomicU64 = AtomicU64::new(0);
        extern "C" fn observe(device: c_int, bytes: u64, limit: u64, free: u64) {
            assert_eq!((device, limit), (0, 100 << 20));
            assert!((1..=256 << 20).contains(&free), "{free}");
            HEARD.fetch_add(bytes, Ordering::Relaxed);
            // On another thread, so that a lock that is held would be waited for without end. A
            // shortage here is not heard of.
            let other = std::thread::spawn(|| {
                let (torch, cuda) = (Torch::load(), Cuda::load());
                let stream = cuda.stream();
                torch.free(torch.malloc(512, stream), stream);
                torch.text("cuvmm_snapshot");
            });
            other.join().unwrap();
            if bytes == 200 << 20 {
                let torch = Torch::load();
                assert_eq!(torch.malloc(size(300 * MIB), Cuda::load().stream()), 0);
            }
        }
        // SAFETY: the function stays.
        unsafe { set(Some(observe)) };
        let kept = torch.malloc(size(4 * MIB), stream);
        assert_eq!(torch.malloc(size(200 * MIB), stream), 0);
        assert_eq!(HEARD.load(Ordering::Relaxed), 200 << 20);
        // SAFETY: null removes it.
        unsafe { set(None) };
        assert_eq!(torch.malloc(size(200 * MIB), stream), 0);
        assert_eq!(HEARD.load(Ordering::Relaxed), 200 << 20);
        torch.free(kept, stream);
    }
}
