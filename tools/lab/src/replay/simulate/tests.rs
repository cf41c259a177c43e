use proptest::prelude::*;

use super::*;
use crate::replay::memory::fake::Counted;

const SECOND: Nanos = 1_000_000_000;

/// One token per second, read or generated, of one byte.
const SLOW: Settings = Settings {
    kv_bytes_per_token: 1,
    prefill_rate: 1.0,
    decode_rate: 1.0,
};

/// Creates a request from a model, an arrival in seconds, and tokens of context and to generate.
fn request((model, arrival, context, generated): (usize, u64, u32, u32)) -> Request {
    Request {
        model,
        arrival: arrival * SECOND,
        context,
        generated,
    }
}

fn play(memory: &mut Counted, requests: &[(usize, u64, u32, u32)]) -> Played {
    let requests: Vec<_> = requests.iter().copied().map(request).collect();
    let mut done = 0;
    let models = memory.tenants.len();
    let played = run(&requests, models, &SLOW, memory, &mut || done += 1).unwrap();
    assert_eq!(done, requests.len());
    assert_eq!(memory.held.iter().sum::<u64>(), 0, "memory is left behind");
    played
}

/// Returns the time to first token in seconds, the preemptions, and the seconds waited.
fn story(outcome: &Outcome) -> (Option<u64>, u32, u64) {
    let first_token = match outcome.fate {
        Fate::Completed { first_token } => Some(first_token / SECOND),
        _ => None,
    };
    (first_token, outcome.preempted, outcome.waited / SECOND)
}

#[test]
fn a_request_reads_its_context_and_grows_token_by_token() {
    let mut memory = Counted::elastic(10, 1, 0);
    let played = play(&mut memory, &[(0, 5, 3, 2)]);
    assert_eq!(
        memory.log,
        ["allocate 0 3", "grow 0 4", "grow 0 5", "free 0 5"]
    );
    assert_eq!(story(&played.outcomes[0]), (Some(3), 0, 0));
    assert_eq!(played.timeline.end(), 9 * SECOND);
}

#[test]
fn what_does_not_fit_waits_in_line_and_holds_up_its_model_only() {
    let mut memory = Counted::elastic(8, 2, 0);
    let requests = [(0, 0, 3, 2), (0, 1, 6, 1), (0, 2, 1, 0), (1, 2, 1, 0)];
    let played = play(&mut memory, &requests);
    let stories: Vec<_> = played.outcomes.iter().map(story).collect();
    // The third request would fit at once, but waits behind the second. The other model's request
    // does not wait.
    assert_eq!(
        stories,
        [
            (Some(3), 0, 0),
            (Some(9), 0, 3),
            (Some(3), 0, 2),
            (Some(1), 0, 0)
        ]
    );
}

#[test]
fn growth_that_does_not_fit_preempts_the_youngest() {
    let mut memory = Counted::elastic(8, 1, 0);
    let played = play(&mut memory, &[(0, 0, 3, 4), (0, 1, 4, 2)]);
    assert_eq!(
        memory.log,
        [
            "allocate 0 3",
            "allocate 1 4",
            "grow 0 4",
            "stay 0 5",
            "free 1 4",
            "grow 0 5",
            // The request is admitted again when its context and the next token fit.
            "refuse 1 5",
            "grow 0 6",
            "grow 0 7",
            "free 0 7",
            "allocate 1 5",
            "grow 1 6",
            "free 1 6",
        ]
    );
    assert_eq!(story(&played.outcomes[0]), (Some(3), 0, 0));
    assert_eq!(story(&played.outcomes[1]), (Some(9), 1, 2));
}

#[test]
fn the_youngest_may_be_the_one_that_grows() {
    let mut memory = Counted::elastic(8, 2, 0);
    let played = play(&mut memory, &[(0, 0, 4, 3), (1, 0, 4, 3)]);
    assert_eq!(
        memory.log[2..6],
        ["stay 0 5", "free 0 4", "refuse 0 5", "grow 1 5"]
    );
    assert_eq!(story(&played.outcomes[0]), (Some(10), 1, 2));
    assert_eq!(story(&played.outcomes[1]), (Some(4), 0, 0));
}

#[test]
fn a_preempted_request_reads_what_it_had_generated_again() {
    let mut memory = Counted::elastic(4, 1, 0);
    memory.granule = 10;
    let played = play(&mut memory, &[(0, 0, 5, 30), (0, 0, 8, 30)]);
    assert_eq!(
        memory.log,
        [
            "allocate 0 1",
            "allocate 1 1",
            "grow 0 2",
            "grow 1 2",
            "stay 0 3",
            "free 1 2",
            "grow 0 3",
            "refuse 1 3",
            "grow 0 4",
            "free 0 4",
            "allocate 1 3",
            "grow 1 4",
            "free 1 4",
        ]
    );
    // Preempted at 20 s with 12 tokens, admitted again at 34 s: 20 tokens to read, 18 to generate.
    assert_eq!(played.timeline.end(), 71 * SECOND);
    assert_eq!(story(&played.outcomes[1]), (Some(8), 1, 14));
}

#[test]
fn who_is_too_large_for_its_share_is_rejected() {
    let mut split = Counted::split(10, 2);
    let requests = [
        (0, 0, 5, 1),
        (0, 0, 5, 0),
        (0, 0, 11, 0),
        (1, 0, 1, u32::MAX),
    ];
    let fates = |played: Played| {
        played
            .outcomes
            .iter()
            .map(|outcome| outcome.fate == Fate::Rejected)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        fates(play(&mut split, &requests)),
        [true, false, true, true]
    );
    let mut elastic = Counted::elastic(10, 2, 2);
    assert_eq!(
        fates(play(&mut elastic, &requests)),
        [false, false, true, true]
    );
}

#[test]
fn an_empty_answer_is_over_when_the_context_is_read() {
    let mut memory = Counted::elastic(8, 1, 0);
    let played = play(&mut memory, &[(0, 0, 8, 0)]);
    assert_eq!(memory.log, ["allocate 0 8", "free 0 8"]);
    assert_eq!(story(&played.outcomes[0]), (Some(8), 0, 0));
}

#[test]
fn a_memory_that_refuses_for_no_reason_is_an_error_and_no_endless_wait() {
    let mut memory = Counted::elastic(8, 1, 0);
    memory.held[0] = 8;
    let error = run(&[request((0, 0, 1, 1))], 1, &SLOW, &mut memory, &mut || {}).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("1 request waiting and nothing running, yet memory is refused: refuse 0 1"),
        "{error}"
    );
}

/// A slow reference implementation of the rules that steps through every second and every token.
mod plain {
    use super::*;

    #[derive(Clone, Default)]
    struct Life {
        tokens: u64,
        running: Option<(u64, u64, u64)>,
        story: Option<u64>,
        over: bool,
        preempted: u32,
        since: u64,
        waited: u64,
    }

    /// Returns for each request the time to first token in seconds (`None` if rejected), the
    /// preemptions, and the seconds waited.
    pub(super) fn play(memory: &mut Counted, requests: &[Request]) -> Vec<(Option<u64>, u32, u64)> {
        let granule = memory.granule;
        let size =
            |at: usize, tokens: u64| (u64::from(requests[at].context) + tokens).div_ceil(granule);
        let models = memory.tenants.len();
        let mut lives = vec![Life::default(); requests.len()];
        let mut queues = vec![VecDeque::new(); models];
        let mut now = 0;
        let mut held: Vec<Option<<Counted as Memory>::Block>> =
            requests.iter().map(|_| None).collect();
        let admit = |memory: &mut Counted,
                     lives: &mut Vec<Life>,
                     held: &mut Vec<Option<_>>,
                     queues: &mut Vec<VecDeque<usize>>,
                     only: Option<usize>,
                     now: u64| {
            let mut heads: Vec<usize> = (0..models)
                .filter(|model| only.is_none_or(|only| only == *model))
                .collect();
            loop {
                heads.retain(|&model| !queues[model].is_empty());
                let Some(&model) = heads.iter().min_by_key(|&&model| queues[model][0]) else {
                    break;
                };
                let at: usize = queues[model][0];
                let life = &mut lives[at];
                let request = &requests[at];
                let ahead = if life.preempted > 0 {
                    life.tokens + 1
                } else {
                    life.tokens
                }
                .min(request.generated.into());
                match memory
                    .allocate(
                        model,
                        at as u64,
                        size(at, ahead),
                        size(at, request.generated.into()),
                    )
                    .unwrap()
                {
                    Some(block) => {
                        held[at] = Some(block);
                        queues[model].pop_front();
                        life.waited += now - life.since;
                        life.running = Some((
                            size(at, ahead),
                            now + u64::from(request.context) + life.tokens,
                            life.tokens,
                        ));
                    }
                    None => heads.retain(|&other| other != model),
                }
            }
        };
        while lives.iter().any(|life| !life.over) {
            for at in 0..requests.len() {
                let Some((granules, ready, had)) = lives[at].running else {
                    continue;
                };
                let last = u64::from(requests[at].generated);
                if now < ready || (last > 0 && now - ready != lives[at].tokens - had) {
                    continue;
                }
                let token = (lives[at].tokens + 1).min(last);
                let need = size(at, token).max(granules);
                let mut freed = false;
                let mut fits = need == granules;
                while !fits {
                    fits = memory.grow(held[at].as_mut().unwrap(), need).unwrap();
                    if fits {
                        break;
                    }
                    let youngest = (0..requests.len())
                        .rev()
                        .find(|&other| {
                            requests[other].model == requests[at].model
                                && lives[other].running.is_some()
                        })
                        .unwrap();
                    // Younger requests are handled after older ones: a token that is due now has
                    // not been generated.
                    lives[youngest].running = None;
                    lives[youngest].preempted += 1;
                    lives[youngest].since = now;
                    memory.free(held[youngest].take().unwrap()).unwrap();
                    queues[requests[at].model].push_front(youngest);
                    freed = true;
                    if youngest == at {
                        break;
                    }
                }
                if fits {
                    let life = &mut lives[at];
                    life.tokens = token;
                    life.running = Some((need, ready, had));
                    life.story
                        .get_or_insert(now - requests[at].arrival / SECOND);
                    if token == last {
                        life.over = true;
                        life.running = None;
                        memory.free(held[at].take().unwrap()).unwrap();
                        freed = true;
                    }
                }
                if freed {
                    admit(memory, &mut lives, &mut held, &mut queues, None, now);
                }
            }
            for (at, request) in requests
                .iter()
                .enumerate()
                .filter(|(_, request)| request.arrival == now * SECOND)
            {
                if size(at, request.generated.into()) > memory.ceiling(request.model) {
                    lives[at].over = true;
                    continue;
                }
                lives[at].since = now;
                queues[request.model].push_back(at);
                if queues[request.model].len() == 1 {
                    admit(
                        memory,
                        &mut lives,
                        &mut held,
                        &mut queues,
                        Some(request.model),
                        now,
                    );
                }
            }
            now += 1;
        }
        lives
            .iter()
            .map(|life| (life.story, life.preempted, life.waited))
            .collect()
    }
}

prop_compose! {
    fn memories()(
        limit in 4u64..40,
        models in 1usize..4,
        share in 0u64..5,
        split in any::<bool>(),
        granule in 1u64..9,
    ) -> Counted {
        let mut memory = if split { Counted::split(limit, models) } else { Counted::elastic(limit, models, limit * share / 4 / models as u64) };
        memory.granule = granule;
        memory
    }
}

fn again(memory: &Counted) -> Counted {
    let mut fresh = Counted::elastic(memory.limit, memory.tenants.len(), 0);
    fresh.tenants.clone_from(&memory.tenants);
    fresh.granule = memory.granule;
    fresh
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn no_request_is_lost_and_jumping_gives_what_walking_gives(
        mut memory in memories(),
        drafts in proptest::collection::vec((0usize..3, 0u64..60, 1u32..60, 0u32..60), 1..30),
    ) {
        let models = memory.tenants.len();
        let mut requests: Vec<_> = drafts.into_iter().map(request).collect();
        requests.iter_mut().for_each(|request| request.model %= models);
        requests.sort_by_key(|request| request.arrival);

        let mut done = 0;
        let played = run(&requests, models, &SLOW, &mut memory, &mut || done += 1).unwrap();
        prop_assert_eq!(done, requests.len());
        prop_assert!(memory.peak <= memory.limit);
        prop_assert_eq!(memory.held.iter().sum::<u64>(), 0);
        prop_assert_eq!(played.timeline.peak(None), memory.peak);
        for (request, outcome) in requests.iter().zip(&played.outcomes) {
            match outcome.fate {
                Fate::Completed { first_token } => prop_assert!(first_token >= SLOW.prefill(request.context.into())),
                Fate::Rejected => prop_assert_eq!((outcome.preempted, outcome.waited), (0, 0)),
                Fate::Unfinished => prop_assert!(false, "lost"),
            }
        }

        let mut walked = again(&memory);
        let plain = plain::play(&mut walked, &requests);
        let jumped: Vec<_> = played.outcomes.iter().map(story).collect();
        prop_assert_eq!(jumped, plain);
    }
}
