//! The server: evictions and sleep do not change answers, and requests that cannot be answered are
//! refused.

use super::*;

#[test]
fn answers_are_the_same_when_requests_are_thrown_out() {
    let specs = [tinier(), tinier()];
    let limit = |sequences| {
        let weights: u64 = specs.iter().map(|spec| spec.weights().unwrap()).sum();
        weights + sequences * specs[0].sequence(1, 512 * 64)
    };
    // The sequences grow beyond 512 tokens in the middle of the answer.
    let requests = at_once([500, 490, 505, 3, 495, 507], 30);
    let serve = |limit| {
        let models = modes::plain(&Device::Cpu, &specs, 4, limit).unwrap();
        serve_all(&models, true, &requests)
    };
    let wide = serve(u64::MAX);
    assert_eq!((wide.figures.thrown_out, wide.figures.again), (0, 0));
    let narrow = serve(limit(4));
    assert!(
        narrow.figures.thrown_out > 0 && narrow.figures.again > 0,
        "{:?}",
        narrow.figures
    );
    assert_eq!(narrow.answers, wide.answers);
}

#[test]
fn a_request_that_can_never_run_is_an_error() {
    let spec = tinier();
    let weights = spec.weights().unwrap();
    let requests = [Request {
        model: 0,
        arrival: Duration::ZERO,
        prompt: 500,
        answer: 30,
    }];
    // Enough memory for the prompt but not for the answer, and not enough for the prompt.
    for (sequences, says) in [(1, "needs more"), (0, "does not fit")] {
        let limit = weights + sequences * spec.sequence(1, 512 * 64);
        let models = modes::plain(&Device::Cpu, std::slice::from_ref(&spec), 4, limit).unwrap();
        let error = Server::serve(&models, true, drawn(&requests, &models))
            .err()
            .unwrap();
        assert!(format!("{error:#}").contains(says), "{error:#}");
    }
}

#[test]
fn a_limit_below_the_weights_names_the_model_that_has_no_room() {
    let specs = [tinier(), tinier()];
    // Enough memory for the first model's weights only.
    let limit = specs[0].weights().unwrap() * 3 / 2;
    let refused = modes::plain(&Device::Cpu, &specs, 4, limit).err().unwrap();
    let refused = format!("{refused:#}");
    assert!(refused.contains("the weights of model 2"), "{refused}");
}

#[test]
fn a_request_that_no_model_can_answer_is_refused_at_once() {
    let mut spec = tinier();
    spec.system = SystemPrompt::drawn(1, 100, 500, true);
    let models = modes::plain(&Device::Cpu, &[spec], 4, u64::MAX).unwrap();
    let request = |model, prompt, answer| Request {
        model,
        arrival: Duration::ZERO,
        prompt,
        answer,
    };
    let refused = |requests: &[Request], tokens: &dyn Fn(&Request) -> Vec<u32>| {
        let asked = requests.iter().map(|request| (*request, tokens(request)));
        let refused = Server::serve(&models, true, asked.collect());
        format!("{:#}", refused.err().expect("it was answered"))
    };
    let good = request(0, 5, 2);
    for (wrong, says) in [
        (request(1, 5, 2), "no model 1"),
        (request(0, 0, 2), "one token"),
        (request(0, 5, 0), "one token"),
        (request(0, 1940, 9), "100 + 1940 + 9 tokens"),
        (request(0, usize::MAX, 9), "of another length"),
    ] {
        let said = refused(&[good, wrong], &|request| vec![1; request.prompt.min(3000)]);
        assert!(said.contains(says), "{wrong:?}: {said}");
    }
    let said = refused(&[good], &|_| vec![1, 2, 3, 4, 500]);
    assert!(said.contains("500 words"), "{said}");
    let said = refused(&[good], &|_| vec![1; 4]);
    assert!(said.contains("of another length"), "{said}");
    // The longest possible request, and no request.
    let longest = Server::serve(&models, true, drawn(&[request(0, 1940, 8)], &models)).unwrap();
    assert_eq!(longest.answers[0].len(), 8);
    let nothing = Server::serve(&models, true, Vec::new()).unwrap();
    assert!(nothing.answers.is_empty());
}

#[test]
fn servers_of_all_kinds_give_the_same_answers() {
    let Some((_turn, gpu)) = gpu("servers_of_all_kinds_give_the_same_answers") else {
        return;
    };
    let mut specs = [tiny(), tiny()];
    specs[1].source = Source::Seed(8);
    // Eight at once, most of which grow into a second granule; then each model alone, in turn, with
    // more requests than fit beside the other model's weights.
    let mut requests = at_once([1000, 990, 1010, 40, 1015, 1003, 600, 1020], 40);
    for (index, model) in [0, 1, 0].into_iter().enumerate() {
        requests.extend((0..8).map(|more| Request {
            model,
            arrival: Duration::from_secs(3 + index as u64),
            prompt: 860 + 20 * more,
            answer: 20,
        }));
    }
    let wide = modes::plain(gpu.candle(), &specs, 8, u64::MAX).unwrap();
    let wide = serve_all(&wide, true, &requests);
    assert_eq!(wide.figures.thrown_out, 0);

    let granule = gpu.device().granularity();
    let weights = specs[0].weights().unwrap().next_multiple_of(granule);
    let limit = 2 * (weights + 3 * specs[0].sequence(1, granule));
    for (split, shared) in [
        (Split::Elastic(Sleep::Keep), true),
        (Split::Elastic(Sleep::Discard), true),
        (Split::Elastic(Sleep::Never), true),
        (Split::Shares, false),
    ] {
        // candle's own tensors are within the pool's limit.
        let models = modes::pooled(&gpu, &specs, 8, (limit, 1 << 30), split).unwrap();
        let served = serve_all(&models, shared, &requests);
        assert!(served.answers == wide.answers, "{split:?}");
        let figures = &served.figures;
        assert!(
            figures.thrown_out > 0 && figures.again > 0,
            "{split:?}: {figures:?}"
        );
        let sleeps = matches!(split, Split::Elastic(Sleep::Keep | Sleep::Discard));
        assert_eq!(!figures.slept.is_empty(), sleeps, "{split:?}: {figures:?}");
        assert_eq!(!figures.woken.is_empty(), sleeps, "{split:?}: {figures:?}");
    }
    gpu.candle().synchronize().unwrap();
    assert_eq!(gpu.device().drop_failures(), 0);
}
