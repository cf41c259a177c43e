//! Beam search with forks: sequences that begin with the same tokens share the memory of that
//! prefix, and forks of strong beams replace weak ones.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::kv::{Part, SequenceId, Shape};
use cuvmm::{Device, KvCache, Limit, Pool, Stream};

/// A small model: 32 KiB per token.
const SHAPE: Shape = Shape {
    layers: 8,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 4096,
    max_sequences: 16,
};

const PROMPT: u64 = 1030;
const BEAMS: usize = 4;

/// A beam: its sequence, the tokens generated for it, and its score.
struct Beam {
    id: SequenceId,
    words: Vec<u8>,
    score: u32,
}

/// Writes the keys of a token, as a decoder's kernel would.
fn write(cache: &mut KvCache, id: SequenceId, token: u64, word: u8) -> Result<(), Box<dyn Error>> {
    let row = vec![word; 2 * SHAPE.kv_heads as usize * SHAPE.head_size as usize];
    Ok(cache.write_rows(id, 3, Part::Key, token, &row)?)
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let limit = Limit::Bytes(512 << 20);
    let pool = Pool::builder(&device).limit(limit).build()?;
    let tenant = pool.tenant("model").register()?;
    let stream = Stream::new(&device)?;
    let cache = KvCache::builder(&tenant, &stream, SHAPE);
    let mut cache = cache.may_fork(true).build()?;

    // Create the prompt, whose rows a prefill kernel would write once.
    let prompt = cache.create(PROMPT)?;
    for token in 0..PROMPT {
        write(&mut cache, prompt, token, token as u8)?;
    }
    let alone = cache.stats().held;
    // Many sequences will begin with the prompt, so its written rows move to few large extents.
    stream.synchronize()?;
    let copied = cache.compact_prefix(prompt, PROMPT)?;
    println!("{} MiB of the prompt moved to few extents", copied >> 20);

    // Fork a sequence for each beam.
    let before = device.calls();
    let mut beams = vec![];
    for index in 0..BEAMS {
        let id = cache.fork(prompt, PROMPT)?;
        let (words, score) = (vec![], index as u32);
        beams.push(Beam { id, words, score });
    }
    let calls = device.calls().since(&before).total();
    let stats = cache.stats();
    println!(
        "a prompt of {} MiB and {BEAMS} forks of it hold {} MiB, \
         {} MiB of it shared; {calls} driver calls",
        alone >> 20,
        stats.held >> 20,
        stats.shared >> 20,
    );
    assert!(
        stats.held < 2 * alone,
        "copies would take {} bytes",
        5 * alone
    );
    // Shared rows cannot be written.
    let refused = write(&mut cache, beams[0].id, 7, 0);
    println!(
        "refused: {}",
        refused.err().ok_or("a token of the prompt was written")?
    );

    // Append a token to each beam per step. Every eight steps, a fork of the strongest beam
    // replaces the weakest.
    for step in 0..40u32 {
        let batch: Vec<_> = beams.iter().map(|beam| (beam.id, 1)).collect();
        cache.append(&batch)?;
        for beam in &mut beams {
            let word = (beam.score % 251) as u8;
            write(&mut cache, beam.id, PROMPT + u64::from(step), word)?;
            beam.words.push(word);
            beam.score = beam.score.wrapping_mul(1_103_515_245).wrapping_add(step) >> 4;
        }
        if step % 8 == 7 {
            beams.sort_by_key(|beam| beam.score);
            let weakest = beams.remove(0);
            cache.free(weakest.id)?;
            let best = beams.last().ok_or("no beam")?;
            let id = cache.fork(best.id, PROMPT + u64::from(step) + 1)?;
            let (words, score) = (best.words.clone(), best.score + 1);
            beams.push(Beam { id, words, score });
        }
    }
    // The prompt is no longer needed. The beams keep the memory that they share with it.
    cache.free(prompt)?;
    for beam in &beams {
        let mut row = vec![0; 2 * SHAPE.kv_heads as usize * SHAPE.head_size as usize];
        for (token, word) in (0..PROMPT)
            .map(|token| token as u8)
            .chain(beam.words.iter().copied())
            .enumerate()
        {
            cache.read_rows(beam.id, 3, Part::Key, token as u64, &mut row)?;
            assert!(row.iter().all(|&byte| byte == word), "token {token}");
        }
    }
    let stats = cache.stats();
    println!(
        "{} tokens in {} sequences take {} MiB; {} MiB held",
        stats.tokens,
        stats.sequences,
        stats.live >> 20,
        stats.held >> 20,
    );
    Ok(())
}
