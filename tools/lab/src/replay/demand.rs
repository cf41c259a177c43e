//! The memory that the requests of a workload would hold if none had to wait.

use super::settings::Settings;
use super::simulate::Request;

/// Returns the mean number of bytes that the requests hold together while they arrive, if each
/// begins at its arrival and its block grows token by token. `None` if all requests arrive at one
/// time.
pub(crate) fn mean(requests: &[Request], settings: &Settings) -> Option<f64> {
    let first = requests.first()?.arrival;
    let last = requests.last()?.arrival;
    let over = last.checked_sub(first).filter(|&time| time > 0)? as f64;
    let held: f64 = requests.iter().map(|one| held(one, settings)).sum();
    Some(held / over)
}

/// Returns the bytes times nanoseconds of one request, which grows evenly while it generates.
fn held(request: &Request, settings: &Settings) -> f64 {
    let (context, generated) = (u64::from(request.context), u64::from(request.generated));
    let bytes = |tokens: f64| tokens * settings.kv_bytes_per_token as f64;
    let reading = bytes(context as f64) * settings.prefill(context) as f64;
    let mean = context as f64 + generated as f64 / 2.0;
    reading + bytes(mean) * settings.decode(generated) as f64
}

#[cfg(test)]
mod tests {
    use super::{Request, Settings, mean};

    fn request(arrival: u64, context: u32, generated: u32) -> Request {
        Request {
            model: 0,
            arrival,
            context,
            generated,
        }
    }

    #[test]
    fn demand_is_memory_by_time_over_the_arrivals() {
        let settings = Settings {
            kv_bytes_per_token: 10,
            prefill_rate: 100.0,
            decode_rate: 10.0,
        };
        // 1 s of reading 100 tokens, and 2 s with 110 tokens in the mean, over 10 s, twice.
        let second = 1_000_000_000;
        let requests = [request(0, 100, 20), request(10 * second, 100, 20)];
        let expected = 2.0 * (1_000.0 + 2.0 * 1_100.0) / 10.0;
        let found = mean(&requests, &settings).unwrap();
        assert!((found - expected).abs() < 1e-6, "{found}");
        assert_eq!(mean(&requests[..1], &settings), None);
        assert_eq!(mean(&[], &settings), None);
    }
}
