//! The server: it admits requests as memory allows, reads their prompts, makes steps of all that
//! run, and when memory is short has idle models sleep and throws out the youngest.
//!
//! Nothing comes over a network. What a client would be sent is kept with the request.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use candle_core::{D, Tensor};

use super::batch::Next;
use super::cache::{Caches, is_shortage};
use super::decoder::Decoder;
use super::figures::{Figures, Sample};
use super::ground::Ground;
use super::schedule::{Id, Schedule};
use super::trace::Request;

/// A model that is served.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) decoder: Decoder,
    pub(crate) ground: Box<dyn Ground>,
    /// Ids of tokens there are.
    pub(crate) words: usize,
}

/// The names of models.
pub(crate) fn names(models: &[Model]) -> Vec<&str> {
    models.iter().map(|model| model.name.as_str()).collect()
}

/// Prompts that are read before those that run make a step again.
const PROMPTS: usize = 4;

/// How often a request is tried that has all memory there is.
const TRIES: u32 = 3;

/// A request and what has become of it.
struct Job {
    request: Request,
    /// Those of the prompt, and the answer as far as it goes.
    tokens: Vec<u32>,
    caches: Caches,
    /// How many tokens the caches have.
    done: usize,
    /// Since it came.
    first: Option<Duration>,
}

pub(crate) struct Server<'a> {
    models: &'a [Model],
    schedule: Schedule,
    jobs: Vec<Job>,
    begun: Instant,
    /// When each model last had something to do.
    busy: Vec<Instant>,
    figures: Figures,
}

/// What was served.
pub(crate) struct Served {
    pub(crate) figures: Figures,
    /// The answer to each request.
    pub(crate) answers: Vec<Vec<u32>>,
}

/// A request and the tokens of its prompt.
pub(crate) type Asked = (Request, Vec<u32>);

/// Prompts for requests, drawn from their numbers.
pub(crate) fn drawn(requests: &[Request], models: &[Model]) -> Vec<Asked> {
    let prompt = |(id, request): (Id, &Request)| {
        let mut random = fastrand::Rng::with_seed(id as u64);
        let words = models.get(request.model).map_or(1, |model| model.words) as u32;
        let tokens = (0..request.prompt).map(|_| random.u32(..words));
        (*request, tokens.collect())
    };
    requests.iter().enumerate().map(prompt).collect()
}

impl<'a> Server<'a> {
    /// Serves requests, in the order in which they come, until all are answered. Models that share their
    /// memory give way to each other.
    pub(crate) fn serve(
        models: &'a [Model],
        shared: bool,
        asked: Vec<Asked>,
    ) -> anyhow::Result<Served> {
        let slots = models.iter().map(|model| model.decoder.slots()).min();
        let job = |(request, tokens): Asked| {
            ensure!(
                request.model < models.len(),
                "there is no model {}",
                request.model
            );
            ensure!(tokens.len() == request.prompt, "a prompt of another length");
            Ok(Job {
                request,
                tokens,
                caches: Caches::new(),
                done: 0,
                first: None,
            })
        };
        let jobs = asked.into_iter().map(job).collect::<anyhow::Result<_>>()?;
        let begun = Instant::now();
        let server = Self {
            models,
            schedule: Schedule::new(models.len(), shared, slots.context("there is no model")?),
            jobs,
            begun,
            busy: vec![begun; models.len()],
            figures: Figures::default(),
        };
        server.run()
    }

    fn run(mut self) -> anyhow::Result<Served> {
        let mut coming = 0;
        let mut tries = 0;
        loop {
            while let Some(job) = self.jobs.get(coming) {
                if job.request.arrival > self.begun.elapsed() {
                    break;
                }
                self.schedule.arrive(job.request.model, coming);
                coming += 1;
            }
            let all_idle = (0..self.models.len()).all(|model| self.schedule.is_idle(model));
            match self.jobs.get(coming) {
                None if all_idle => break,
                Some(job) if all_idle => {
                    let now = self.begun.elapsed();
                    std::thread::sleep(job.request.arrival.saturating_sub(now));
                    continue;
                }
                _ => {}
            }
            let admitted = self.admit()?;
            for model in 0..self.models.len() {
                if !self.schedule.is_idle(model) {
                    self.busy[model] = Instant::now();
                }
                self.step(model)?;
            }
            self.sample();
            let waits = |model| self.schedule.waiting(model) > 0;
            let runs = |model| !self.schedule.running(model).is_empty();
            let stuck = self.schedule.groups().any(|group| {
                let mut models = self.schedule.group(group);
                models.clone().any(waits) && !models.any(runs)
            });
            tries = if stuck && !admitted { tries + 1 } else { 0 };
            if tries > TRIES {
                bail!("a request does not fit, with all memory there is");
            }
        }
        let all = self.begun.elapsed();
        self.figures.finish(all);
        let answer = |job: Job| job.tokens[job.request.prompt..].to_vec();
        Ok(Served {
            figures: self.figures,
            answers: self.jobs.into_iter().map(answer).collect(),
        })
    }

    /// Reads the prompts of the oldest that wait, as far as there is memory. Whether any was read.
    fn admit(&mut self) -> anyhow::Result<bool> {
        let mut any = false;
        for group in self.schedule.groups() {
            for _ in 0..PROMPTS {
                let Some((model, id)) = self.schedule.next(group) else {
                    break;
                };
                if !self.make_room(model, id)? || !self.read(model, id)? {
                    self.models[model].ground.settle()?;
                    break;
                }
                any = true;
            }
        }
        Ok(any)
    }

    /// Sees to it that there is memory for a request, and wakes its model. Whether there is.
    fn make_room(&mut self, model: usize, id: Id) -> anyhow::Result<bool> {
        let ground = &self.models[model].ground;
        let sequence = ground.sequence(self.jobs[id].tokens.len() + 1);
        loop {
            let asleep = ground.is_asleep();
            let wanted = sequence + if asleep { ground.weights() } else { 0 };
            if ground.room()? >= wanted {
                if !asleep {
                    return Ok(true);
                }
                let begun = Instant::now();
                if ground.wake()? {
                    self.figures.woken.push(begun.elapsed());
                    return Ok(true);
                }
            }
            if !self.sleep_one(model)? {
                return Ok(false);
            }
        }
    }

    /// Has the model sleep that was idle the longest, of those that share their memory with one. Whether
    /// there is one.
    fn sleep_one(&mut self, model: usize) -> anyhow::Result<bool> {
        let mut idle: Vec<usize> = self
            .schedule
            .group(model)
            .filter(|&other| other != model && self.schedule.is_idle(other))
            .filter(|&other| !self.models[other].ground.is_asleep())
            .collect();
        idle.sort_by_key(|&other| self.busy[other]);
        for other in idle {
            let begun = Instant::now();
            if self.models[other].ground.sleep()? {
                self.figures.slept.push(begun.elapsed());
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads a request's prompt. Whether there was memory.
    fn read(&mut self, model: usize, id: Id) -> anyhow::Result<bool> {
        let Model {
            decoder, ground, ..
        } = &self.models[model];
        let job = &mut self.jobs[id];
        let mut caches: Caches = (0..decoder.layers()).map(|_| ground.cache()).collect();
        let prompt = job.request.prompt;
        let logits = match decoder.prompt(&job.tokens[..prompt], &mut caches) {
            Ok(logits) => logits,
            Err(error) if is_shortage(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        (job.caches, job.done) = (caches, prompt);
        self.schedule.admit(model, id);
        let token = likeliest(&logits)?;
        self.take(model, id, *token.first().context("a row")?)?;
        Ok(true)
    }

    /// One token of each request that runs in a model.
    fn step(&mut self, model: usize) -> anyhow::Result<()> {
        let mut tries = 0;
        loop {
            let running: Vec<Id> = self.schedule.running(model).iter().copied().collect();
            if running.is_empty() {
                return Ok(());
            }
            let mut caches: Vec<Caches> = running
                .iter()
                .map(|&id| std::mem::take(&mut self.jobs[id].caches))
                .collect();
            let mut next: Vec<Next<'_>> = running
                .iter()
                .zip(&mut caches)
                .map(|(&id, caches)| Next {
                    token: self.jobs[id].tokens[self.jobs[id].done],
                    position: self.jobs[id].done,
                    caches,
                })
                .collect();
            let made = self.models[model].decoder.step(&mut next);
            for (&id, caches) in running.iter().zip(caches) {
                self.jobs[id].caches = caches;
            }
            match made {
                Ok(logits) => {
                    for (&id, token) in running.iter().zip(likeliest(&logits)?) {
                        self.jobs[id].done += 1;
                        self.take(model, id, token)?;
                    }
                    return Ok(());
                }
                Err(error) if is_shortage(&error) => {
                    for &id in &running {
                        let Job { caches, done, .. } = &mut self.jobs[id];
                        for cache in caches {
                            cache.truncate(*done)?;
                        }
                    }
                    self.relieve(model, tries, error)?;
                    tries += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Gets memory for a step: what is on its way, then what idle models have, then what the youngest
    /// has.
    fn relieve(
        &mut self,
        model: usize,
        tries: u32,
        error: candle_core::Error,
    ) -> anyhow::Result<()> {
        if tries > 0 && !self.sleep_one(model)? {
            let Some((other, id)) = self.schedule.victim(model) else {
                return Err(error).context("a request has all memory there is, and wants more");
            };
            self.schedule.throw_out(other, id);
            let job = &mut self.jobs[id];
            (job.caches, job.done) = (Caches::new(), 0);
            self.figures.thrown_out += 1;
        }
        self.models[model].ground.settle()
    }

    /// A token behind those that the caches have: the answer's next, or one that was given before the
    /// request was thrown out.
    fn take(&mut self, model: usize, id: Id, token: u32) -> anyhow::Result<()> {
        let job = &mut self.jobs[id];
        match job.tokens.get(job.done) {
            Some(&given) => {
                ensure!(
                    given == token,
                    "computed anew, token {} of request {id} is {token} and was {given}",
                    job.done
                );
                self.figures.again += 1;
            }
            None => {
                job.tokens.push(token);
                self.figures.tokens += 1;
                if job.first.is_none() {
                    let first = self.begun.elapsed().saturating_sub(job.request.arrival);
                    job.first = Some(first);
                    self.figures.first.push(first);
                }
            }
        }
        if job.tokens.len() == job.request.prompt + job.request.answer {
            job.caches.clear();
            self.schedule.finish(model, id);
        }
        Ok(())
    }

    fn sample(&mut self) {
        let at = self.begun.elapsed();
        if !self.figures.wants_sample(at) {
            return;
        }
        let models = self.models.iter().enumerate().map(|(index, model)| {
            let (waiting, running) = (
                self.schedule.waiting(index),
                self.schedule.running(index).len(),
            );
            Sample {
                held: model.ground.held(),
                asleep: model.ground.is_asleep(),
                waiting,
                running,
            }
        });
        self.figures.sample(at, models.collect());
    }
}

/// The likeliest token of each row.
pub(crate) fn likeliest(logits: &Tensor) -> candle_core::Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.to_vec1()
}
