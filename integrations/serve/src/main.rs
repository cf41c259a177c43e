//! A server without a network: several Llama-shaped models on one GPU under one limit. Requests
//! come from a trace or a seed, and may begin with a system prompt that all requests of a model
//! share.
//!
//! There are three modes: tenants of an elastic pool, in which idle models sleep; a static split of
//! the pool; and candle's own memory and cache. Needs a GPU.

mod attention;
mod batch;
mod bytes;
mod cache;
mod cache_memory;
mod compare;
mod decoder;
mod figures;
mod forks;
mod model;
mod modes;
mod options;
mod prefix;
mod relief;
mod rotary;
mod schedule;
mod server;
mod state;
mod system;
#[cfg(test)]
mod tests;
mod trace;
mod weights;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use cuvmm_candle::Gpu;

use model::names;
use options::{Mode, Options};
use server::{Server, drawn};
use trace::Request;

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    options.check()?;
    let gpu = Gpu::open(0)?;
    if options.compare {
        return compare::run(&gpu, &options);
    }
    match &options.prompt {
        Some(prompt) => answer(&gpu, &options, prompt),
        None => serve(&gpu, &options),
    }
}

fn serve(gpu: &Gpu, options: &Options) -> anyhow::Result<()> {
    let requests = options.requests(&options.config()?, None)?;
    let device = gpu.device();
    let before = used(device)?;
    let (models, shared) = compare::models(gpu, options, options.mode)?;
    let (served, most) = watched(device, || {
        Server::serve(&models, shared, drawn(&requests, &models))
    })?;
    println!(
        "the device's used memory, by the driver: {} MiB before, at most {} MiB more",
        before >> 20,
        most.saturating_sub(before) >> 20,
    );
    let first = models.first();
    if let Some(intermediates) = first.and_then(|model| model.intermediates.as_ref()) {
        let stats = intermediates.pool().stats()?;
        println!(
            "candle's own tensors: {} of {} MiB held now",
            stats.reserved >> 20,
            stats.maximum >> 20
        );
    }
    println!("{:.1} tokens/s", served.figures.rate());
    served.figures.print_models(&names(&models));
    let name = match options.mode {
        Mode::Elastic => "elastic",
        Mode::Static => "static split",
        Mode::Candle => "candle's own",
    };
    println!("{}", figures::table(&[(name, &served.figures)])?);
    for (what, all) in [
        ("to sleep", &served.figures.slept),
        ("to wake", &served.figures.woken),
    ] {
        if let Some(most) = all.iter().max() {
            println!(
                "{what}: {} times, at most {:.1} ms",
                all.len(),
                most.as_secs_f64() * 1e3
            );
        }
    }
    Ok(())
}

/// Returns the device memory in use, by the driver's count.
fn used(device: &cuvmm::Device) -> anyhow::Result<u64> {
    let info = device.memory_info()?;
    Ok(info.total - info.free)
}

/// Runs `work`, and returns its result with the most device memory in use meanwhile.
fn watched<T>(
    device: &cuvmm::Device,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, u64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !stop.load(Ordering::Relaxed) {
                most = most.max(used(device)?);
                std::thread::sleep(Duration::from_millis(2));
            }
            anyhow::Ok(most)
        });
        let done = work();
        stop.store(true, Ordering::Relaxed);
        let most = watcher
            .join()
            .map_err(|_| anyhow::anyhow!("the watcher panicked"))??;
        Ok((done?, most))
    })
}

/// Answers one prompt, after the system prompt.
fn answer(gpu: &Gpu, options: &Options, prompt: &str) -> anyhow::Result<()> {
    let tokens = bytes::encode(prompt);
    let request = Request {
        model: 0,
        arrival: Duration::ZERO,
        prompt: tokens.len(),
        answer: options.answer,
    };
    let (models, shared) = compare::models(gpu, options, options.mode)?;
    let mut served = Server::serve(&models, shared, vec![(request, tokens)])?;
    let answer = served.answers.pop().context("there is an answer")?;
    println!("{prompt}{}", bytes::decode(&answer));
    Ok(())
}
