//! Paged caches sleep and wake with the tag of their name, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null_mut, without_provenance};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::graphs::Graphs;
use crate::common::paged::Paged;
use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, over_the_stand_in, refused};
use cuvmm::LedgerView;
use cuvmm::ledger::{Control, GroupRequest};
use serde_json::Value;

/// The bytes of a block in each layer and part of a cache of [`Paged::cache`].
const ROWS: usize = MIB / 4;

const CHAT: &str = r#"["chat"]"#;

static CALLS: AtomicU64 = AtomicU64::new(0);

/// Gives up blocks 0 to 3 of the cache.
unsafe extern "C" fn gives_up(token: u64, _: u64) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    Paged::load().release(token, &[0, 1, 2, 3]).unwrap();
}

struct Scene {
    paged: Paged,
    tags: Tags,
    cuda: Cuda,
}

impl Scene {
    fn load() -> Self {
        Self {
            paged: Paged::load(),
            tags: Tags::load(),
            cuda: Cuda::load(),
        }
    }

    /// The address of a block of a block-major cache.
    fn at(&self, cache: u64, number: usize) -> usize {
        self.paged.view(cache, 0, 0).0 + number * MIB
    }

    /// Fills all of a block.
    fn fill(&self, cache: u64, number: usize, byte: u8) {
        self.cuda.fill_block(self.at(cache, number), byte);
    }

    fn expect(&self, cache: u64, number: usize, byte: u8) {
        self.cuda.expect(self.at(cache, number), byte, MIB);
    }

    /// Returns the figures of a tag.
    fn tag(&self, name: &str) -> Value {
        let figures: Value = serde_json::from_str(&self.paged.torch.json(0)).unwrap();
        let tags = figures["pools"].as_array().unwrap().iter();
        let mut found = tags.filter(|it| it["name"] == name);
        found.next().unwrap().clone()
    }

    fn mib_of(&self, tag: &str, figure: &str) -> u64 {
        self.tag(tag)[figure].as_u64().unwrap() >> 20
    }

    /// Ends all, and finds nothing left.
    fn ends(&self, caches: &[u64], addresses: &[usize]) {
        caches.iter().for_each(|&cache| self.paged.end(cache));
        addresses
            .iter()
            .for_each(|&address| self.tags.free(address));
        self.cuda.synchronize(null_mut());
        self.tags.torch.reset();
        assert_eq!(self.cuda.physicals_and_mappings(), (0, 0));
    }
}

impl Cuda {
    fn fill_block(&self, address: usize, byte: u8) {
        self.fill(address, byte, MIB, null_mut());
        self.synchronize(null_mut());
    }
}

over_the_stand_in! {
    caches_sleep_and_wake_with_the_blocks_of_their_tag [] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, r#", "pinned": [63]"#).unwrap();
        let second = it.paged.cache("chat", 8, "").unwrap();
        let other = it.paged.cache("code", 8, "").unwrap();
        let weights = it.tags.allocate("chat", 4);
        it.paged.back(chat, &[0, 1, 5]).unwrap();
        it.paged.back(second, &[2]).unwrap();
        it.paged.back(other, &[0]).unwrap();
        for (cache, number, byte) in [(chat, 0, 1), (chat, 5, 2), (chat, 63, 3), (second, 2, 4), (other, 0, 5)] {
            it.fill(cache, number, byte);
        }
        it.cuda.fill(weights, 6, 4 * MIB, null_mut());
        it.cuda.synchronize(null_mut());
        let held = it.paged.torch.number("cuvmm_stats", "total.held") >> 20;
        assert_eq!((held, it.mib_of("chat", "bytes"), it.mib_of("chat", "paged")), (14, 12, 8));
        for keep in [true, false] {
            it.tags.sleep(CHAT, keep).unwrap();
            assert_eq!(it.tags.asleep(), CHAT);
            let held = it.paged.torch.number("cuvmm_stats", "total.held") >> 20;
            let sleeping = it.paged.torch.number("cuvmm_stats", "sleeping") >> 20;
            assert_eq!((held, sleeping, it.mib_of("chat", "bytes")), (2, 12, 12));
            assert_eq!(it.mib_of("chat", "paged"), 8);
            let figures = ["committed", "asleep", "held", "in_use", "pinned"];
            let figures = figures.map(|name| it.paged.figure(chat, name));
            assert_eq!(figures, [0, 6 << 20, 0, 3, 1]);
            assert!(it.tags.torch.text("cuvmm_table").contains("asleep     12 MiB"));
            let asleep = "sleeps with the pool \"chat\": call cuvmm.wake(\"chat\") first";
            refused(it.paged.back(chat, &[7]), asleep);
            refused(it.paged.back(chat, &[0]), asleep);
            refused(it.paged.release(second, &[2]), asleep);
            refused(it.paged.reserve(chat, 1), asleep);
            refused(it.paged.cache("chat", 8, ""), "the tag \"chat\" is asleep");
            assert_eq!((it.paged.can_allocate(chat, 1), it.paged.purge(chat)), (0, 0));
            refused(it.tags.sleep(CHAT, keep), "asleep");
            // The other tag is awake, and steps may begin.
            it.paged.back(other, &[1]).unwrap();
            let step = it.paged.begin_step(chat).unwrap();
            it.paged.end_step(chat, step);

            it.tags.wake(CHAT).unwrap();
            let bytes = if keep { [1, 2, 3, 4] } else { [0; 4] };
            for ((cache, number), byte) in [(chat, 0), (chat, 5), (chat, 63), (second, 2)].into_iter().zip(bytes) {
                it.expect(cache, number, byte);
            }
            it.expect(other, 0, 5);
            if keep {
                it.cuda.expect(weights, 6, 4 * MIB);
            }
            assert_eq!(it.paged.figure(chat, "asleep"), 0);
            it.paged.back(chat, &[7]).unwrap();
            it.paged.release(chat, &[7]).unwrap();
        }
        refused(it.tags.wake(CHAT), "the tag \"chat\" is awake");
        it.ends(&[chat, second, other], &[weights]);
    }

    a_graph_that_reads_a_cache_replays_after_waking [] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        let out = it.tags.allocate("out", 2);
        it.paged.back(chat, &[0, 9]).unwrap();
        let stream = it.cuda.stream();
        let copy: unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_int =
            it.cuda.function("cuMemcpyDtoDAsync_v2");
        let from = it.at(chat, 9);
        let graph = it.cuda.capture(stream, || {
            // SAFETY: both ranges have memory when the graph runs.
            assert_eq!(unsafe { copy(out as u64, from as u64, MIB, stream) }, 0);
        });
        for byte in [1, 2] {
            it.fill(chat, 9, byte);
            it.tags.sleep(CHAT, true).unwrap();
            // Its memory is another's meanwhile.
            let between = it.tags.allocate("between", 64);
            it.cuda.fill(between, 77, 64 * MIB, null_mut());
            it.cuda.synchronize(null_mut());
            it.tags.free(between);
            it.tags.wake(CHAT).unwrap();
            it.cuda.launch(graph, stream);
            it.cuda.synchronize(stream);
            it.cuda.expect(out, byte, MIB);
        }
        it.ends(&[chat], &[out]);
    }

    work_and_steps_keep_a_cache_awake [] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        it.paged.back(chat, &[0, 1]).unwrap();
        let within: unsafe extern "C" fn(*const c_char, c_int, f64) -> c_int =
            it.tags.torch.function("cuvmm_sleep_within");
        // SAFETY: the text is terminated.
        let sleep = |seconds| it.tags.outcome(unsafe { within(c"[\"chat\"]".as_ptr(), 1, seconds) });
        let step = it.paged.begin_step(chat).unwrap();
        it.paged.release(chat, &[1]).unwrap();
        refused(sleep(0.0), "the tag \"chat\" of device 0: ");
        assert_eq!((it.tags.asleep(), it.paged.figure(chat, "committed") >> 20), ("[]".to_owned(), 2));
        it.paged.end_step(chat, step);
        // A stream that the library does not know.
        let foreign = it.cuda.stream();
        it.cuda.hold(foreign, true);
        it.cuda.fill(it.at(chat, 0), 5, MIB, foreign);
        let handle = foreign.expose_provenance();
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| {
                it.cuda.enter(0);
                it.tags.sleep(CHAT, true)
            });
            for _ in 0..100 {
                std::thread::yield_now();
                assert!(it.cuda.physicals_and_mappings().1 > 0, "unmapped under a kernel");
            }
            it.cuda.hold(std::ptr::with_exposed_provenance_mut(handle), false);
            asleep.join().unwrap().unwrap();
        });
        assert_eq!(it.cuda.physicals_and_mappings(), (0, 0));
        // While a graph may be captured.
        let graphs = Graphs::of(&it.tags.torch, &it.cuda);
        graphs.begin(1, foreign);
        refused(it.tags.wake(CHAT), "captured");
        graphs.end(1);
        graphs.release(1);
        it.tags.wake(CHAT).unwrap();
        it.expect(chat, 0, 5);
        it.ends(&[chat], &[]);
    }

    all_wake_or_none ["CUVMM_TORCH_LIMIT" = "16MiB"] says ["under a tag"] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        let code = it.paged.cache("code", 64, "").unwrap();
        let weights = it.tags.allocate("chat", 4);
        it.paged.back(chat, &[0, 1, 2, 3]).unwrap();
        it.paged.back(code, &[0]).unwrap();
        it.fill(chat, 3, 9);
        it.tags.sleep("null", true).unwrap();
        let taken = it.tags.allocate("other", 10);
        let within: unsafe extern "C" fn(*const c_char, f64) -> c_int =
            it.tags.torch.function("cuvmm_wake_within");
        // SAFETY: the text is terminated.
        assert_eq!(unsafe { within(c"[\"code\", \"chat\"]".as_ptr(), 0.0) }, -3);
        assert_eq!(it.tags.asleep(), r#"["chat","code"]"#);
        assert_eq!([chat, code].map(|cache| it.paged.figure(cache, "asleep") >> 20), [4, 2]);
        it.tags.free(taken);
        it.tags.wake("null").unwrap();
        it.expect(chat, 3, 9);
        // Memory of a tag beside its cache, under the same limit.
        assert_eq!(it.tags.allocate("chat", 8), 0);
        it.ends(&[chat, code], &[weights]);
    }

    tags_with_caches_change_places ["CUVMM_TORCH_LIMIT" = "16MiB"] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        let all: Vec<i32> = (0..10).collect();
        it.paged.back(chat, &all).unwrap();
        it.fill(chat, 9, 1);
        it.tags.sleep(CHAT, true).unwrap();
        let code = it.paged.cache("code", 64, "").unwrap();
        let weights = it.tags.allocate("code", 4);
        it.paged.back(code, &all[..6]).unwrap();
        it.fill(code, 5, 2);
        for _ in 0..2 {
            it.tags.exchange(r#"["code"]"#, CHAT, 1).unwrap();
            assert_eq!(it.tags.asleep(), r#"["code"]"#);
            it.expect(chat, 9, 1);
            it.tags.exchange("null", "null", 2).unwrap();
            assert_eq!(it.tags.asleep(), CHAT);
            it.expect(code, 5, 2);
        }
        it.ends(&[chat, code], &[weights]);
    }

    host_memory_is_taken_in_advance_and_given_back [] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        it.paged.back(chat, &[0, 1, 2, 3]).unwrap();
        it.fill(chat, 2, 3);
        it.tags.prepare(CHAT).unwrap();
        assert_eq!(it.tags.host(), 4);
        it.tags.sleep(CHAT, true).unwrap();
        assert_eq!(it.tags.host(), 4);
        assert_eq!(it.tags.release_host(CHAT), Ok(0));
        it.tags.wake(CHAT).unwrap();
        it.expect(chat, 2, 3);
        assert_eq!(it.tags.release_host(CHAT), Ok(4));
        // Too little host memory.
        it.tags.limit_host(2);
        refused(it.tags.sleep(CHAT, true), "chat");
        assert_eq!(it.tags.asleep(), "[]");
        it.expect(chat, 2, 3);
        it.tags.limit_host(1 << 30);
        // The last cache of a tag ends asleep, and its contents go.
        it.tags.sleep(CHAT, true).unwrap();
        assert_eq!(it.tags.host(), 4);
        it.paged.end(chat);
        assert_eq!(it.tags.host(), 0);
        it.tags.wake(CHAT).unwrap();
        it.ends(&[], &[]);
    }

    another_program_puts_a_group_to_sleep [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let it = Scene::load();
        let torch = &it.tags.torch;
        let configure: unsafe extern "C" fn(*const c_char) -> c_int = torch.function("cuvmm_configure");
        let join: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int =
            torch.function("cuvmm_group_join");
        let json = serde_json::json!({ "ledger": directory.path() });
        let json = CString::new(json.to_string()).unwrap();
        let mut group = 0;
        // SAFETY: the texts are terminated, and the number can be written.
        unsafe {
            assert_eq!(configure(json.as_ptr()), 0);
            assert_eq!(join(c"{\"name\": \"tp0\", \"ranks\": 1}".as_ptr(), &raw mut group), 0);
        }
        let chat = it.paged.cache("chat", 64, "").unwrap();
        it.paged.back(chat, &[0]).unwrap();
        it.fill(chat, 0, 4);
        let mut files = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path());
        let ledger = files.find(|path| path.extension() == Some("cuvmm-ledger".as_ref()));
        let view = LedgerView::open(ledger.unwrap()).unwrap();
        let ranks = [view.control(view.stats().processes[0].slot)];
        let ask = |wake| {
            let request = GroupRequest::new("tp0", wake);
            Control::group(&ranks, &request).pop().unwrap().unwrap();
        };
        ask(false);
        assert_eq!((it.tags.asleep(), it.paged.figure(chat, "asleep") >> 20), (CHAT.to_owned(), 2));
        ask(true);
        it.expect(chat, 0, 4);
        it.ends(&[chat], &[]);
    }

    names_that_cannot_be_shared_are_refused [] says [] {
        let it = Scene::load();
        let shareable: unsafe extern "C" fn(*const c_char) -> c_int =
            it.tags.torch.function("cuvmm_tag_shareable");
        // SAFETY: the texts are terminated.
        unsafe {
            assert_eq!(shareable(c"sent".as_ptr()), 0);
            refused(it.paged.cache("sent", 8, ""), "the pool \"sent\" is shareable");
            let chat = it.paged.cache("chat", 8, "").unwrap();
            refused(it.tags.outcome(shareable(c"chat".as_ptr())), "not shareable");
            refused(it.paged.cache("torch", 8, ""), "\"torch\", which is that of the process's other memory");
            // Contents of a cache are read after it has woken, and no part of them is marked.
            it.paged.back(chat, &[0]).unwrap();
            let (address, mut byte) = (it.at(chat, 0), 0_u8);
            let read: unsafe extern "C" fn(*const c_void, usize, *mut c_void) -> c_int =
                it.tags.torch.function("cuvmm_read_kept");
            let read = |byte: &mut u8| read(without_provenance(address), 1, std::ptr::from_mut(byte).cast());
            assert_eq!(read(&mut byte), 1);
            refused(it.tags.keep(address, ROWS), "no pool has the memory");
            it.tags.sleep(CHAT, true).unwrap();
            assert_eq!(read(&mut byte), -1);
            refused(it.tags.keep(address, ROWS), "no pool has the memory");
            it.tags.wake(CHAT).unwrap();
            it.ends(&[chat], &[]);
        }
    }

    functions_under_pressure_are_called_while_a_cache_has_one ["CUVMM_TORCH_LIMIT" = "8MiB"] says [] {
        let it = Scene::load();
        // A tag that had memory first.
        let weights = it.tags.allocate("chat", 2);
        let chat = it.paged.cache("chat", 64, "").unwrap();
        it.paged.back(chat, &[0, 1, 2, 3]).unwrap();
        it.paged.on_pressure(chat, Some(gives_up));
        let code = it.paged.cache("code", 64, "").unwrap();
        it.paged.back(code, &[0, 1, 2, 3]).unwrap();
        assert_eq!((CALLS.swap(0, Ordering::SeqCst), it.paged.figure(chat, "in_use")), (1, 0));
        // Memory of the tag alone could not be given up by a function.
        it.paged.end(chat);
        let second = it.paged.cache("chat", 64, "").unwrap();
        assert!(it.paged.back(code, &[4, 5, 6, 7]).is_err());
        assert_eq!(CALLS.load(Ordering::SeqCst), 0);
        it.ends(&[code, second], &[weights]);
    }

    a_refusal_of_the_driver_leaves_a_tag_as_it_was [] says [] {
        let it = Scene::load();
        let chat = it.paged.cache("chat", 64, "").unwrap();
        let weights = it.tags.allocate("chat", 4);
        it.paged.back(chat, &[0, 1, 2]).unwrap();
        it.fill(chat, 2, 7);
        it.cuda.fill(weights, 6, 4 * MIB, null_mut());
        it.cuda.synchronize(null_mut());
        for call in ["cuMemUnmap", "cuMemcpyDtoHAsync_v2"] {
            for number in 1..4 {
                it.cuda.fail(Some(&format!("{call}:{number}")));
                let slept = it.tags.sleep(CHAT, true);
                it.cuda.fail(None);
                if slept.is_ok() {
                    it.tags.wake(CHAT).unwrap();
                }
                assert_eq!(it.tags.asleep(), "[]", "{call} {number}");
                it.expect(chat, 2, 7);
                it.cuda.expect(weights, 6, 4 * MIB);
            }
        }
        it.ends(&[chat], &[weights]);
    }
}
