//! One sequence on a GPU: with either cache, while the cache grows and sleeps.

use super::*;

/// Returns the logits of a prompt and of each step, bit for bit, of a sequence that continues with
/// its own tokens. `between` runs between two steps.
fn generated(
    decoder: &Decoder,
    make: &dyn Fn() -> Box<dyn Cache>,
    mut between: impl FnMut(usize),
) -> Vec<Vec<u32>> {
    let mut own = caches(decoder, make);
    let prompt = tokens(1000, 5);
    let mut logits = decoder.prompt(&prompt, 0, &mut own).unwrap();
    let mut all = vec![bits(&logits).unwrap()];
    for index in 0..60 {
        between(index);
        let token = crate::server::likeliest(&logits).unwrap()[0];
        logits = step(decoder, token, prompt.len() + index, &mut own);
        all.push(bits(&logits).unwrap());
    }
    all
}

#[test]
fn both_caches_give_the_same_bits_while_they_grow() {
    let Some((_turn, gpu)) = gpu("both_caches_give_the_same_bits_while_they_grow") else {
        return;
    };
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &tiny(), Asleep::Never, 96);
    let (begun, mut seen) = (memory.tenant().stats().in_use, Vec::new());
    let ours = generated(&decoder, &|| cache_memory.cache(), |_| {
        let caches = memory.tenant().stats().in_use - begun;
        if seen.last() != Some(&caches) {
            seen.push(caches);
        }
    });
    // Four rows of one granule each, and then of two.
    assert_eq!(seen, [8 << 20, 16 << 20]);
    assert!(ours == generated(&decoder, &cache::candle, |_| {}));
}

#[test]
fn a_generation_sleeps_and_goes_on() {
    let Some((_turn, gpu)) = gpu("a_generation_sleeps_and_goes_on") else {
        return;
    };
    let store = HostStore::builder(gpu.device())
        .pinned(96 << 20)
        .build()
        .unwrap();
    let asleep = Asleep::Keep(Rc::new(store));
    let (_pool, memory, cache_memory, decoder) = elastic(&gpu, &tiny(), asleep, 96);
    let expected = generated(&decoder, &cache::candle, |_| {});
    let mut slept = 0;
    let ours = generated(&decoder, &|| cache_memory.cache(), |index| {
        // Before the cache grows, and afterwards.
        if index % 25 == 10 {
            assert!(cache_memory.sleep().unwrap() && cache_memory.is_asleep());
            assert_eq!(memory.tenant().stats().committed, 0);
            // Meanwhile another tenant takes all the memory and writes to it.
            gpu.device().synchronize().unwrap();
            let other = memory.tenant().allocate_on(gpu.stream(), 80 << 20).unwrap();
            other.write(0, &vec![0xff; 80 << 20]).unwrap();
            assert!(!cache_memory.wake().unwrap(), "there was room");
            drop(other);
            assert!(cache_memory.wake().unwrap() && !cache_memory.is_asleep());
            slept += 1;
        }
    });
    assert_eq!(slept, 2);
    assert!(ours == expected);
}
