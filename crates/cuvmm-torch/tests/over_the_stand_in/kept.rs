//! Tags that sleep together, each with a treatment of its own, and kept contents that are read
//! meanwhile, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, over_the_stand_in};

type SleepEach = unsafe extern "C" fn(*const c_char) -> c_int;
type ReadKept = unsafe extern "C" fn(*const c_void, usize, *mut c_void) -> c_int;

fn sleep_each(tags: &Tags, json: &str) -> Result<(), String> {
    let sleep: SleepEach = tags.torch.function("cuvmm_sleep_each");
    let json = CString::new(json).unwrap();
    // SAFETY: the text is terminated, and the tests do not use memory that sleeps.
    tags.outcome(unsafe { sleep(json.as_ptr()) })
}

/// Reads kept contents. Returns `None` if the memory is awake, or under no tag.
fn read_kept(tags: &Tags, address: usize, bytes: usize) -> Result<Option<Vec<u8>>, String> {
    let read: ReadKept = tags.torch.function("cuvmm_read_kept");
    let mut buffer = vec![0xee; bytes];
    let address = std::ptr::without_provenance(address);
    // SAFETY: the buffer has that many bytes.
    match unsafe { read(address, bytes, buffer.as_mut_ptr().cast()) } {
        1 => Ok(None),
        code => tags.outcome(code).map(|()| Some(buffer)),
    }
}

over_the_stand_in! {
    each_tag_is_kept_or_lost_as_it_says [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let (weights, cache) = (tags.allocate("weights", 20), tags.allocate("cache", 30));
        cuda.fill_all(&[(weights, 20 * MIB), (cache, 30 * MIB)]);
        for keep in [1, 2] {
            let json = format!(r#"{{"weights": {keep}, "cache": 0}}"#);
            sleep_each(&tags, &json).unwrap();
            assert_eq!(tags.asleep(), r#"["cache","weights"]"#);
            assert_eq!(cuda.physicals_and_mappings(), (0, 0));
            assert_eq!(tags.host(), 20);
            tags.wake("null").unwrap();
            cuda.expect(weights, 1, 20 * MIB);
        }
    }

    a_tag_that_cannot_sleep_leaves_the_others_awake [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let (weights, cache) = (tags.allocate("weights", 20), tags.allocate("cache", 4));
        cuda.fill_all(&[(weights, 20 * MIB), (cache, 4 * MIB)]);
        let before = cuda.physicals_and_mappings();
        let refused = |json: &str, text: &str| {
            let error = sleep_each(&tags, json).unwrap_err();
            assert!(error.contains(text), "{error}");
            assert_eq!((tags.asleep().as_str(), cuda.physicals_and_mappings()), ("[]", before));
        };
        refused(r#"{"weights": 1, "cache": 3}"#, "keep is 3");
        refused(r#"["weights"]"#, "the JSON is not understood");
        refused(r#"{"cache": 0, "other": 1}"#, "under the tag \"other\"");
        // The contents of `cache` are to be lost, and `weights` finds too little host memory.
        tags.limit_host(10);
        refused(r#"{"cache": 0, "weights": 1}"#, "cannot keep");
        cuda.expect(weights, 1, 20 * MIB);
        cuda.expect(cache, 2, 4 * MIB);
        sleep_each(&tags, "{}").unwrap();
        assert_eq!(tags.asleep(), "[]");
    }

    kept_contents_are_read_while_their_tag_sleeps [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let weights = tags.allocate("weights", 20);
        let lost = tags.allocate("cache", 4);
        cuda.fill_all(&[(weights, 10 * MIB), (weights + 10 * MIB, 10 * MIB)]);
        assert_eq!(read_kept(&tags, weights, 4), Ok(None));
        assert_eq!(read_kept(&tags, 0x1234, 4), Ok(None));
        let small = tags.allocate("weights", 1);
        tags.allocate("weights", 1);
        sleep_each(&tags, r#"{"weights": 1, "cache": 0}"#).unwrap();
        // Two small allocations share a block.
        read_kept(&tags, small, MIB).unwrap().unwrap();
        assert!(read_kept(&tags, small, MIB + 1).unwrap_err().contains("in one allocation"));
        // A range in one piece of a copy, one over its end, and all.
        for (from, to) in [(0, 4), (10 * MIB - 1, 10 * MIB + 1), (MIB, 19 * MIB), (0, 20 * MIB)] {
            let bytes = read_kept(&tags, weights + from, to - from).unwrap().unwrap();
            let ones = (10 * MIB).clamp(from, to) - from;
            let (low, high) = bytes.split_at(ones);
            assert!(low.iter().all(|&it| it == 1) && high.iter().all(|&it| it == 2), "{from}");
        }
        assert_eq!(read_kept(&tags, weights, 0), Ok(Some(vec![])));
        let refused = |address: usize, bytes: usize, text: &str| {
            let error = read_kept(&tags, address, bytes).unwrap_err();
            assert!(error.contains(text), "{error}");
        };
        refused(weights + 20 * MIB - 3, 4, "\"weights\"");
        refused(lost, 4, "the tag \"cache\" of device 0: the contents of the block (4 MiB) were discarded");
        tags.wake("null").unwrap();
        assert_eq!(read_kept(&tags, weights, 4), Ok(None));
        cuda.expect(weights, 1, 10 * MIB);
        let read: ReadKept = tags.torch.function("cuvmm_read_kept");
        // SAFETY: a null buffer is refused.
        let nowhere = unsafe { read(std::ptr::without_provenance(weights), 4, null_mut()) };
        assert!(tags.outcome(nowhere).unwrap_err().contains("null"));
    }
}
