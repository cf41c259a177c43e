//! The server: admits requests as memory allows, computes their prompts and makes steps of all
//! running requests.
//!
//! [`relief`](super::relief) gets memory when it is short. There is no network: the answer to a
//! client is kept with the request.

use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use candle_core::{D, Tensor};

use super::batch::Next;
use super::cache::{Caches, is_shortage};
use super::figures::{Figures, Sample};
use super::model::Model;
use super::prefix::Prefix;
use super::schedule::{Id, Schedule};
use super::state::Job;
pub(crate) use super::state::Server;
use super::trace::Request;

/// The number of prompts that are computed before the running requests make another step.
const PROMPTS: usize = 4;

/// The number of attempts for a request while no other request runs: with a fork of the prefix, and
/// in all.
const FORKED: u32 = 3;
const TRIES: u32 = 5;

pub(crate) struct Served {
    pub(crate) figures: Figures,
    pub(crate) answers: Vec<Vec<u32>>,
}

pub(crate) type Asked = (Request, Vec<u32>);

/// Returns prompts for requests, drawn from their numbers.
pub(crate) fn drawn(requests: &[Request], models: &[Model]) -> Vec<Asked> {
    let prompt = |(id, request): (Id, &Request)| {
        let mut random = fastrand::Rng::with_seed(id as u64);
        let words = models.get(request.model).map_or(1, |model| model.words) as u32;
        let tokens = (0..request.prompt).map(|_| random.u32(..words));
        (*request, tokens.collect())
    };
    requests.iter().enumerate().map(prompt).collect()
}

/// Checks that a model can answer a request: a position or a token out of range would otherwise
/// show only as a fault in a kernel.
fn check(models: &[Model], request: &Request, tokens: &[u32]) -> anyhow::Result<()> {
    let Request { prompt, answer, .. } = *request;
    let model = models.get(request.model);
    let model = model.with_context(|| format!("there is no model {}", request.model))?;
    ensure!(tokens.len() == prompt, "a prompt of another length");
    ensure!(
        prompt > 0 && answer > 0,
        "a prompt and an answer have one token at least"
    );
    let (system, longest) = (model.system.tokens.len(), model.decoder.longest());
    ensure!(
        answer <= longest && system + prompt <= longest - answer,
        "{system} + {prompt} + {answer} tokens of system prompt, prompt and answer are more than the \
         {longest} that a sequence may have"
    );
    let word = |&token: &u32| (token as usize) < model.words;
    let strange = tokens.iter().find(|token| !word(token));
    if let Some(strange) = strange {
        bail!("token {strange} is not one of the {} words", model.words);
    }
    Ok(())
}

impl<'a> Server<'a> {
    /// Serves requests in the order of their arrival until all are answered. Models that share
    /// memory give way to each other.
    pub(crate) fn serve(
        models: &'a [Model],
        shared: bool,
        asked: Vec<Asked>,
    ) -> anyhow::Result<Served> {
        let slots = models.iter().map(|model| model.decoder.slots()).min();
        let job = |(request, tokens): Asked| {
            check(models, &request, &tokens)?;
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
        let schedule = Schedule::new(models.len(), shared, slots.context("there is no model")?);
        let server = Self {
            models,
            prefixes: models.iter().map(Prefix::new).collect(),
            stuck: vec![0; schedule.groups().len()],
            schedule,
            jobs,
            begun,
            busy: vec![begun; models.len()],
            figures: Figures::default(),
        };
        server.run()
    }

    fn run(mut self) -> anyhow::Result<Served> {
        let mut coming = 0;
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
            let groups = self.schedule.groups();
            let begun = groups.map(|group| self.admit(group));
            let begun: Vec<bool> = begun.collect::<anyhow::Result<_>>()?;
            for model in 0..self.models.len() {
                if !self.schedule.is_idle(model) {
                    self.busy[model] = Instant::now();
                }
                self.step(model)?;
            }
            self.sample();
            for (group, begun) in begun.into_iter().enumerate() {
                let stuck = !begun && self.schedule.is_still(group);
                self.stuck[group] = if stuck { self.stuck[group] + 1 } else { 0 };
                if self.stuck[group] >= TRIES {
                    bail!("a request does not fit, with all memory there is");
                }
            }
        }
        let all = self.begun.elapsed();
        self.figures.finish(all);
        self.figures.prefixes = self.prefixes.iter().map(Prefix::uses).collect();
        let answer = |job: Job| job.tokens[job.request.prompt..].to_vec();
        Ok(Served {
            figures: self.figures,
            answers: self.jobs.into_iter().map(answer).collect(),
        })
    }

    /// Computes the prompts of the oldest waiting requests of a group, as far as memory allows.
    /// Returns `true` if any was computed.
    fn admit(&mut self, group: usize) -> anyhow::Result<bool> {
        let mut any = false;
        for _ in 0..PROMPTS {
            let Some((model, id)) = self.schedule.next(group) else {
                break;
            };
            let may_fork = any || self.stuck[group] < FORKED;
            if !may_fork {
                self.prefixes[model].give_up();
            }
            let fits = self.make_room(model, id, may_fork)?;
            if fits && self.read(model, id, may_fork)? {
                any = true;
                continue;
            }
            if fits && self.stuck[group] > 0 {
                // The request takes more memory than estimated.
                self.take_unused(model)?;
            }
            self.models[model].cache_memory.settle()?;
            break;
        }
        Ok(any)
    }

    /// Computes a request's prompt after the system prompt. Returns `true` if there was memory.
    fn read(&mut self, model: usize, id: Id, may_fork: bool) -> anyhow::Result<bool> {
        let Model {
            decoder, system, ..
        } = &self.models[model];
        let (prefix, job) = (&mut self.prefixes[model], &mut self.jobs[id]);
        let hit = prefix.is_hit(may_fork);
        let (before, prompt) = (system.tokens.len(), job.request.prompt);
        let read = prefix.begin(may_fork).and_then(|mut caches| {
            let logits = decoder.prompt(&job.tokens[..prompt], before, &mut caches)?;
            Ok((caches, logits))
        });
        let (caches, logits) = match read {
            Ok(read) => read,
            Err(error) if is_shortage(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if hit {
            prefix.hit();
        }
        (job.caches, job.done) = (caches, prompt);
        self.schedule.admit(model, id);
        let token = likeliest(&logits)?;
        self.take(model, id, *token.first().context("a row")?)?;
        Ok(true)
    }

    /// Computes one token of each running request of a model.
    fn step(&mut self, model: usize) -> anyhow::Result<()> {
        let before = self.models[model].system.tokens.len();
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
                    position: before + self.jobs[id].done,
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
                            cache.truncate(before + *done)?;
                        }
                    }
                    self.relieve(model, tries, error)?;
                    tries += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes the token after those in the caches: the answer's next token, or a token that was
    /// answered before the request was evicted.
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
                held: model.cache_memory.held(),
                asleep: model.cache_memory.is_asleep(),
                waiting,
                running,
            }
        });
        self.figures.sample(at, models.collect());
    }
}

pub(crate) fn likeliest(logits: &Tensor) -> candle_core::Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.to_vec1()
}
