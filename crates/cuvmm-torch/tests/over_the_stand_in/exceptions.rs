//! PyTorch's exceptions and its filters of streams, with a stand-in for PyTorch's C++ library.
//!
//! `unsafe` is used to call the functions of the C++ libraries.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;

use crate::common::{Cuda, Handle, MIB, Torch, compiled, loaded, over_the_stand_in};

type Malloc = unsafe extern "C-unwind" fn(isize, c_int, Handle) -> *mut c_void;
type Attempt =
    unsafe extern "C" fn(Malloc, c_long, Handle, *mut *mut c_void, *mut c_char, usize) -> c_int;

/// Loads a stand-in for libc10.so, and returns its function that allocates and catches.
fn c10(folder: &std::path::Path, options: &[&str]) -> Option<Attempt> {
    let options = [options, &["-Wl,-soname,libc10.so"]].concat();
    let library = loaded(compiled(folder, "c10.cpp", "libc10.so", &options)?);
    // SAFETY: the function has this type.
    Some(unsafe { *library.get::<Attempt>("c10_attempt").unwrap() })
}

/// Allocates, and returns what happened, the address, and the text of an exception.
fn attempt(attempt: Attempt, torch: &Torch, size: usize, stream: Handle) -> (c_int, usize, String) {
    let (mut address, mut text) = (null_mut(), [0; 8192]);
    let malloc: Malloc = torch.function("cuvmm_malloc");
    let size = c_long::try_from(size).unwrap();
    // SAFETY: the results are written to locals of these lengths.
    let code = unsafe {
        attempt(
            malloc,
            size,
            stream,
            &mut address,
            text.as_mut_ptr(),
            text.len(),
        )
    };
    // SAFETY: the text is terminated, if there is one.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    (code, address.addr(), text.to_str().unwrap().to_owned())
}

over_the_stand_in! {
    out_of_memory_is_an_exception ["CUVMM_TORCH_LIMIT" = "100MiB"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let folder = tempfile::tempdir().unwrap();
        let Some(allocate) = c10(folder.path(), &[]) else {
            return;
        };
        let (code, address, _) = attempt(allocate, &torch, 60 * MIB, stream);
        assert_eq!(code, 0);
        cuda.fill(address, 3, 60 * MIB, stream);
        for round in 1..=3 {
            let (code, _, text) = attempt(allocate, &torch, 60 * MIB, stream);
            assert_eq!(code, 1, "{text}");
            let begins = "CUDA out of memory. Tried to allocate 60.00 MiB. GPU 0 has a total capacity of 256.00 MiB of which";
            assert!(text.starts_with(begins), "{text}");
            for part in ["allocated  60 MiB in 1 allocation", "raised from cuvmm_malloc at cuvmm:0"] {
                assert!(text.contains(part), "{text}\nlacks: {part}");
            }
            assert_eq!(torch.figure("failed"), round);
            assert_eq!(torch.number("cuvmm_memory_stats", "num_ooms"), round);
            assert!(torch.last_error().starts_with("out of memory"), "{}", torch.last_error());
        }
        // What was allocated is as before, and the heap serves on.
        cuda.synchronize(stream);
        cuda.expect(address, 3, 60 * MIB);
        let (code, next, _) = attempt(allocate, &torch, 30 * MIB, stream);
        assert_eq!(code, 0);
        torch.free(next, stream);
        torch.free(address, stream);
        assert_eq!(attempt(allocate, &torch, 90 * MIB, stream).0, 0);
        // More than there are addresses for is more than there is memory.
        for size in [1 << 50, isize::MAX as usize] {
            let (code, _, text) = attempt(allocate, &torch, size, stream);
            assert_eq!(code, 1, "{text}");
            assert!(text.starts_with("CUDA out of memory. Tried to allocate"), "{text}");
        }
        // Other failures are PyTorch's other exception.
        let (code, _, text) = attempt(allocate, &torch, 512, crate::common::default_stream(2));
        assert_eq!(code, 2, "{text}");
        let begins = "allocation of 512 B on device 0 failed: the per-thread default stream";
        assert!(text.starts_with(begins), "{text}");
    }

    allocations_are_reported_to_an_active_profiler [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let folder = tempfile::tempdir().unwrap();
        let profile: unsafe extern "C" fn() -> c_int = torch.function("cuvmm_profile");
        // SAFETY: it may be called at any time.
        assert_eq!(unsafe { profile() }, 1, "PyTorch is not in the process");
        let options = ["-Wl,-soname,libc10.so"];
        let Some(path) = compiled(folder.path(), "c10.cpp", "libc10.so", &options) else {
            return;
        };
        let library = loaded(path);
        // SAFETY: the functions have these types.
        let (on, reported) = unsafe {
            let on = *library.get::<unsafe extern "C" fn(c_int)>("c10_profiles").unwrap();
            let reported = library.get::<unsafe extern "C" fn() -> *const [i64; 6]>("c10_reported");
            (on, *reported.unwrap())
        };
        // SAFETY: one thread uses the library.
        let reported = || unsafe { *reported() };
        let number = |value: usize| i64::try_from(value).unwrap();
        // SAFETY: it may be called at any time.
        assert_eq!(unsafe { profile() }, 0);
        let early = torch.malloc(1000, stream);
        assert_eq!(reported()[5], 0, "no profiler is active");
        // SAFETY: it may be called at any time.
        unsafe { on(1) };
        let address = torch.malloc(3 << 20, stream);
        let held = i64::try_from(torch.figure("held")).unwrap();
        assert_eq!(reported(), [number(address), 3 << 20, 1024 + (3 << 20), held, 1000, 1]);
        torch.free(early, stream);
        assert_eq!(reported(), [number(early), -1024, 3 << 20, held, 1000, 2]);
        // SAFETY: it may be called at any time.
        unsafe { on(0) };
        torch.free(address, stream);
        assert_eq!(reported()[5], 2);
    }

    without_the_class_another_is_thrown ["CUVMM_TORCH_LIMIT" = "100MiB"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let folder = tempfile::tempdir().unwrap();
        let Some(allocate) = c10(folder.path(), &["-DWITHOUT_CLASSES"]) else {
            return;
        };
        let (code, _, text) = attempt(allocate, &torch, 200 * MIB, stream);
        assert_eq!(code, 2, "{text}");
        let begins = "CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total capacity of 256.00 MiB of which";
        assert!(text.starts_with(begins), "{text}");
        assert_eq!(attempt(allocate, &torch, 90 * MIB, stream).0, 0);
    }

    a_filter_of_streams_is_asked_while_its_pool_is_open [] says [
        "memory pool (4, 5) of device 0: the memory pool (4, 5) is not open",
        "memory pool (6, 0) of device 0: there is no memory pool (6, 0)",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (inside, outside) = (cuda.stream(), cuda.stream());
        let folder = tempfile::tempdir().unwrap();
        let end: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
        let release: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_release_pool");
        let Some(library) = compiled(folder.path(), "filter.cpp", "libfilter.so", &[]) else {
            return crate::common::complain_twice(&torch);
        };
        let library = loaded(library);
        type One = unsafe extern "C" fn(*const c_void, u64, u64);
        type Begin = unsafe extern "C" fn(*const c_void, u64, u64, Handle);
        // SAFETY: the functions have these types.
        let (begin, begin_empty, begin_throwing, call) = unsafe {
            (
                *library.get::<Begin>("filter_begin").unwrap(),
                *library.get::<One>("filter_begin_empty").unwrap(),
                *library.get::<One>("filter_begin_throwing").unwrap(),
                *library.get::<One>("filter_end").unwrap(),
            )
        };
        // SAFETY: the functions have these types.
        let (asked, alive, malloc) = unsafe {
            (
                *library.get::<unsafe extern "C" fn() -> c_long>("filter_asked").unwrap(),
                *library.get::<unsafe extern "C" fn() -> c_int>("filter_alive").unwrap(),
                *library
                    .get::<unsafe extern "C" fn(Malloc, c_long, Handle) -> *mut c_void>("filter_malloc")
                    .unwrap(),
            )
        };
        let opener: *const c_void = torch.function("cuvmm_begin_allocate_to_pool");
        let (closer, releaser): (*const c_void, *const c_void) =
            (torch.function("cuvmm_end_allocate_to_pool"), torch.function("cuvmm_release_pool"));
        // SAFETY: all functions have these types, and the streams live.
        unsafe {
            begin(opener, 4, 5, inside);
            assert_eq!((asked(), alive()), (0, 1));
            let first = torch.malloc(4096, inside);
            let other = torch.malloc(4096, outside);
            assert_eq!(asked(), 2);
            assert_eq!(torch.figure("live"), 4096, "the pool's heap is another one");
            assert_eq!(torch.number("cuvmm_memory_stats", "allocation.all.current"), 2);
            call(closer, 4, 5);
            assert_eq!(alive(), 0, "the copy of the function ends");
            let third = torch.malloc(4096, inside);
            assert_eq!(asked(), 2, "no pool is open");
            assert_eq!(torch.figure("live"), 2 * 4096);
            // The same pool again, with a function that is empty: all streams.
            begin_empty(opener, 4, 5);
            let fourth = torch.malloc(4096, outside);
            assert_eq!(torch.figure("live"), 2 * 4096);
            end(0, [4, 5]);
            for address in [first, other, third, fourth] {
                torch.free(address, inside);
            }
            assert_eq!(torch.number("cuvmm_memory_stats", "allocation.all.current"), 0);
            call(releaser, 4, 5);
            // A function that throws: the exception passes, and nothing stays locked.
            begin_throwing(opener, 4, 5);
            let allocate: Malloc = torch.function("cuvmm_malloc");
            assert!(malloc(allocate, 4096, inside).is_null());
            end(0, [4, 5]);
            assert_ne!(torch.malloc(4096, inside), 0);
            call(releaser, 4, 5);
            end(0, [4, 5]);
            release(0, [6, 0]);
        }
    }
}
