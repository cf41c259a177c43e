//! Memory of graphs that sleeps with a tag, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::common::graphs::Graphs;
use crate::common::tags::Tags;
use crate::common::{Cuda, Handle, MIB, Torch, over_the_stand_in, refused};

/// The functions, and a stream.
struct All {
    torch: Torch,
    cuda: Cuda,
    graphs: Graphs,
    tags: Tags,
    stream: Handle,
    begin: unsafe extern "C" fn(*const c_char, c_int, *mut u64) -> c_int,
    end: unsafe extern "C" fn(u64),
    malloc: unsafe extern "C" fn(isize, c_int, Handle) -> *mut c_void,
}

impl All {
    fn load() -> Self {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        Self {
            torch,
            cuda,
            graphs: Graphs::of(&torch, &cuda),
            tags: Tags::load(),
            stream: cuda.stream(),
            begin: torch.function("cuvmm_graphs_begin"),
            end: torch.function("cuvmm_tag_end"),
            malloc: torch.function("cuvmm_graph_malloc"),
        }
    }

    /// Enters a tag for graphs. Returns an error's text.
    fn enter(&self, tag: &str, keep: c_int) -> Result<u64, String> {
        let (tag, mut token) = (CString::new(tag).unwrap(), 0);
        // SAFETY: the text is terminated, and the number is written.
        let code = unsafe { (self.begin)(tag.as_ptr(), keep, &raw mut token) };
        self.tags.outcome(code).map(|()| token)
    }

    fn leave(&self, token: u64) {
        // SAFETY: it may be called at any time.
        unsafe { (self.end)(token) };
    }

    /// Does something under a tag for graphs.
    fn with_graphs<T>(&self, tag: &str, keep: c_int, body: impl FnOnce() -> T) -> T {
        let token = self.enter(tag, keep).unwrap();
        let value = body();
        self.leave(token);
        value
    }

    /// Does something under a tag for allocations.
    fn under<T>(&self, tag: &str, body: impl FnOnce() -> T) -> T {
        let tag = CString::new(tag).unwrap();
        // SAFETY: the text is terminated.
        unsafe { assert_eq!((self.tags.enter)(tag.as_ptr()), 0) };
        let value = body();
        // SAFETY: it may be called at any time.
        unsafe { (self.tags.leave)() };
        value
    }

    /// Captures into a pool. Returns the executable graph.
    fn capture(&self, pool: u64, body: impl FnOnce()) -> Handle {
        self.graphs.begin(pool, self.stream);
        let graph = self.cuda.capture(self.stream, body);
        self.graphs.end(pool);
        graph
    }

    fn mib(&self, mib: usize) -> usize {
        self.torch.mib(mib, self.stream)
    }

    fn block(&self, mib: usize) -> usize {
        let size = isize::try_from(mib * MIB).unwrap();
        // SAFETY: the stream lives.
        unsafe { (self.malloc)(size, 0, self.stream) }.addr()
    }

    fn launch(&self, graph: Handle) {
        self.cuda.launch(graph, self.stream);
        self.cuda.synchronize(self.stream);
    }

    /// Returns the pool of the allocation at an address.
    fn pool_of(&self, address: usize) -> Option<u64> {
        let text = self.torch.text("cuvmm_snapshot");
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let all = json["allocations"].as_array().unwrap();
        let found = all.iter().find(|it| it["address"] == address).unwrap();
        found["pool"]
            .get(0)
            .map(|_| found["pool"][1].as_u64().unwrap())
    }
}

/// A tag's memory for graphs, and memory that other code makes at the same size.
const SIZE: usize = 8;

over_the_stand_in! {
    the_memory_of_a_graph_sleeps_with_its_tag [] says [] {
        let all = All::load();
        let weights = all.tags.allocate("decode", 4);
        let (mut first, mut last) = (0, 0);
        let graph = all.with_graphs("decode", 1, || all.capture(1, || {
            first = all.mib(SIZE);
            all.cuda.fill(first, 1, SIZE * MIB, all.stream);
            last = all.mib(SIZE);
            all.cuda.fill(last, 2, SIZE * MIB, all.stream);
            all.torch.free(first, all.stream);
        }));
        all.launch(graph);
        all.cuda.fill(weights, 3, 4 * MIB, all.stream);
        all.cuda.synchronize(all.stream);
        let before = all.cuda.physicals_and_mappings();
        for keep in [false, true] {
            all.tags.sleep(r#"["decode"]"#, keep).unwrap();
            assert_eq!(all.cuda.physicals_and_mappings(), (0, 0));
            assert_eq!(all.torch.number("cuvmm_stats", "sleeping"), ((4 + SIZE) * MIB) as u64);
            assert_eq!(all.torch.number("cuvmm_stats", "total.live"), 0);
            // The memory is there for others.
            let other = all.mib(230);
            all.cuda.fill(other, 9, 230 * MIB, all.stream);
            all.torch.free(other, all.stream);
            all.torch.reset();
            all.tags.wake("null").unwrap();
            assert_eq!(all.cuda.physicals_and_mappings(), before);
            // Kept, also by the sleep that discards other memory.
            all.cuda.expect(first, 1, SIZE * MIB);
            all.cuda.expect(last, 2, SIZE * MIB);
            all.cuda.fill(last, 8, SIZE * MIB, all.stream);
            all.launch(graph);
            all.cuda.expect(last, 2, SIZE * MIB);
            assert_eq!(all.torch.number("cuvmm_stats", "sleeping"), 0);
        }
        // An allocation may end asleep, and so may the pool.
        all.cuda.fill(weights, 3, 4 * MIB, all.stream);
        all.tags.sleep("null", true).unwrap();
        all.torch.free(last, all.stream);
        assert_eq!(all.torch.number("cuvmm_stats", "sleeping"), (4 * MIB) as u64);
        all.graphs.release(1);
        all.tags.wake("null").unwrap();
        all.cuda.expect(weights, 3, 4 * MIB);
        all.tags.free(weights);
        all.torch.reset();
        assert_eq!(all.cuda.physicals_and_mappings(), (0, 0));
    }

    contents_of_graphs_that_write_first_are_not_kept [] says [] {
        let all = All::load();
        let mut out = 0;
        let graph = all.with_graphs("decode", 0, || all.capture(1, || {
            out = all.mib(SIZE);
            all.cuda.fill(out, 2, SIZE * MIB, all.stream);
        }));
        all.tags.sleep(r#"["decode"]"#, true).unwrap();
        assert_eq!((all.tags.host(), all.cuda.physicals_and_mappings()), (0, (0, 0)));
        all.tags.wake("null").unwrap();
        all.launch(graph);
        all.cuda.expect(out, 2, SIZE * MIB);
        assert!(all.enter("decode", 2).unwrap_err().contains("keep is 2"));
    }

    a_tag_wins_if_it_was_entered_after_the_capture_began [] says [] {
        let all = All::load();
        let (mut pools, mut inner) = (0, 0);
        all.under("before", || all.capture(1, || pools = all.mib(SIZE)));
        assert_eq!(all.pool_of(pools), Some(1));
        refused(all.tags.sleep(r#"["before"]"#, true), "no memory was allocated under the tag");
        let graph = all.capture(1, || {
            inner = all.under("after", || all.mib(SIZE));
            all.cuda.fill(inner, 5, SIZE * MIB, all.stream);
            assert_ne!(all.mib(SIZE), inner);
        });
        assert_eq!(all.pool_of(inner), Some(0));
        all.tags.sleep(r#"["after"]"#, false).unwrap();
        all.tags.wake(r#"["after"]"#).unwrap();
        all.launch(graph);
        all.cuda.expect(inner, 5, SIZE * MIB);
        // An outer tag and an inner one: the inner one counts.
        let mut outer = 0;
        all.under("outer", || {
            all.capture(2, || {
                outer = all.mib(SIZE);
                all.under("after", || all.torch.free(all.mib(SIZE), all.stream));
            })
        });
        assert_eq!(all.pool_of(outer), Some(2));
    }

    memory_of_a_tag_in_a_capture_serves_captures_only [] says [] {
        let all = All::load();
        let take = || all.under("scratch", || {
            let address = all.mib(SIZE);
            all.torch.free(address, all.stream);
            address
        });
        let mut inner = Vec::new();
        let graph = all.capture(1, || {
            inner.push(take());
            all.cuda.fill(inner[0], 4, SIZE * MIB, all.stream);
        });
        all.graphs.release(1);
        all.torch.reset();
        // Code outside of captures gets other memory, under the tag and without it.
        let others = [all.under("scratch", || all.mib(SIZE)), all.mib(SIZE)];
        for other in others {
            all.cuda.fill(other, 7, SIZE * MIB, all.stream);
        }
        all.launch(graph);
        for other in others {
            all.cuda.expect(other, 7, SIZE * MIB);
        }
        all.cuda.expect(inner[0], 4, SIZE * MIB);
        // The next capture gets the same.
        all.capture(2, || inner.push(take()));
        assert_eq!(inner[0], inner[1]);
    }

    graphs_and_blocks_of_a_tag_wake_together_or_not_at_all ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let all = All::load();
        let weights = all.tags.allocate("decode", 16);
        all.with_graphs("decode", 1, || all.capture(1, || assert_ne!(all.mib(16), 0)));
        all.tags.sleep("null", true).unwrap();
        let other = all.mib(40);
        let (handle, cuda, torch) = (all.stream.expose_provenance(), all.cuda, all.torch);
        std::thread::scope(|scope| {
            let wake = all.tags.wake;
            let woken = scope.spawn(move || {
                cuda.enter(0);
                // SAFETY: the text is terminated.
                unsafe { wake(c"null".as_ptr()) }
            });
            // It waits until the memory is free.
            for _ in 0..1000 {
                std::thread::yield_now();
                assert_eq!(all.tags.asleep(), r#"["decode"]"#);
            }
            torch.free(other, std::ptr::with_exposed_provenance_mut(handle));
            assert_eq!(woken.join().unwrap(), 0);
        });
        assert_eq!(all.tags.asleep(), "[]");
        all.cuda.fill(weights, 1, 16 * MIB, all.stream);
        all.cuda.synchronize(all.stream);
    }

    blocks_for_graphs_are_kept_by_a_sleep_that_discards [] says [] {
        let all = All::load();
        let plain = all.tags.allocate("decode", 4);
        let block = all.with_graphs("decode", 1, || all.block(SIZE));
        let written = all.with_graphs("decode", 0, || all.block(4));
        for (number, address) in (1..).zip([plain, block, written]) {
            all.cuda.fill(address, number, 4 * MIB, all.stream);
        }
        all.cuda.synchronize(all.stream);
        all.tags.sleep("null", false).unwrap();
        assert_eq!(all.cuda.physicals_and_mappings(), (0, 0));
        assert_eq!(all.tags.host(), 8);
        all.tags.wake("null").unwrap();
        all.cuda.expect(block, 2, 4 * MIB);
        all.tags.sleep("null", true).unwrap();
        all.tags.wake("null").unwrap();
        all.cuda.expect(block, 2, 4 * MIB);
        // Small requests have blocks of their own, on threads without a tag too.
        let token = all.enter("decode", 1).unwrap();
        let (cuda, malloc) = (all.cuda, all.malloc);
        let small = std::thread::scope(|scope| {
            let made = scope.spawn(move || {
                cuda.enter(0);
                // SAFETY: the default stream lives.
                unsafe { malloc(512, 0, null_mut()) }.addr()
            });
            made.join().unwrap()
        });
        all.leave(token);
        assert!(small != 0 && small.is_multiple_of(2 * MIB));
        for address in [small, plain, block, written] {
            all.tags.free(address);
        }
        all.torch.reset();
        assert_eq!(all.cuda.physicals_and_mappings(), (0, 0));
    }

    marked_memory_of_graphs_that_write_first_is_kept_by_an_exchange [] says [] {
        let all = All::load();
        let written = all.with_graphs("decode", 0, || all.block(4));
        all.cuda.fill(written, 2, 4 * MIB, all.stream);
        all.cuda.synchronize(all.stream);
        let mark = all.tags.keep(written + MIB, MIB).unwrap();
        for _ in 0..2 {
            all.tags.exchange(r#"["decode"]"#, "[]", 1).unwrap();
            all.tags.wake("null").unwrap();
            all.cuda.expect(written + MIB, 2, MIB);
            all.cuda.expect(written, 0, MIB);
        }
        // A mark that has ended keeps nothing, and refuses nothing.
        let end: unsafe extern "C" fn(u64) = all.torch.function("cuvmm_keep_end");
        // SAFETY: it takes any number.
        unsafe { end(mark) };
        all.tags.exchange(r#"["decode"]"#, "[]", 1).unwrap();
        all.tags.wake("null").unwrap();
        all.cuda.expect(written, 0, 4 * MIB);
        all.tags.free(written);
    }

    the_contents_of_graphs_stay_counted_when_the_last_block_is_freed [] says [] {
        let all = All::load();
        let weights = all.tags.allocate("decode", 4);
        let mut kept = 0;
        let graph = all.with_graphs("decode", 1, || all.capture(1, || {
            kept = all.mib(SIZE);
            all.cuda.fill(kept, 1, SIZE * MIB, all.stream);
        }));
        all.launch(graph);
        all.tags.sleep(r#"["decode"]"#, true).unwrap();
        assert_eq!(all.tags.host(), (4 + SIZE) as u64);
        all.tags.free(weights);
        assert_eq!(all.tags.host(), (4 + SIZE) as u64);
        // The contents count against the limit of another tag.
        all.tags.limit_host((4 + SIZE) as u64 + 2);
        let other = all.tags.allocate("other", 4);
        refused(all.tags.sleep(r#"["other"]"#, true), "cannot keep 4 MiB");
        all.tags.wake(r#"["decode"]"#).unwrap();
        all.cuda.expect(kept, 1, SIZE * MIB);
        all.tags.sleep(r#"["other"]"#, true).unwrap();
        all.tags.free(other);
    }

    a_block_for_graphs_breaks_no_capture [] says [
        "a capture is running",
    ] {
        let all = All::load();
        // Freed memory waits for all work of the device, which must not be asked for.
        let freed = all.tags.allocate("decode", 200);
        all.cuda.fill(freed, 1, MIB, all.stream);
        all.tags.free(freed);
        let token = all.enter("decode", 1).unwrap();
        let mut blocks = [0, 1];
        all.cuda.capture(all.stream, || blocks = [all.block(SIZE), all.block(200)]);
        all.leave(token);
        assert_ne!(blocks[0], 0);
        assert_eq!(blocks[1], 0, "only memory that must be asked for is left");
    }
}
