//! The settings of a model: memory per token, and the rates at which tokens are processed.
//!
//! Requests do not queue for compute: each runs at these rates regardless of the load, so the
//! replay measures memory only.

use serde::{Deserialize, Serialize};

/// Nanoseconds of virtual time, counted from the first arrival.
pub(crate) type Nanos = u64;

const SECOND: f64 = 1e9;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Bytes of KV cache per token, at least 1.
    pub(crate) kv_bytes_per_token: u64,
    /// Tokens per second at which the context of one request is read, from 1 to a million. Within
    /// these bounds every time fits in 64 bits of nanoseconds, and consecutive tokens have
    /// different times.
    pub(crate) prefill_rate: f64,
    /// Tokens per second that one request generates, from 1 to a million.
    pub(crate) decode_rate: f64,
}

impl Default for Settings {
    /// Returns the settings of an 8B model with grouped-query attention at 16 bits: 32 layers, 8
    /// heads of size 128, keys and values.
    fn default() -> Self {
        Self {
            kv_bytes_per_token: 131_072,
            prefill_rate: 8_000.0,
            decode_rate: 40.0,
        }
    }
}

impl Settings {
    pub(crate) fn prefill(&self, tokens: u64) -> Nanos {
        nanos(tokens, self.prefill_rate)
    }

    pub(crate) fn decode(&self, tokens: u64) -> Nanos {
        nanos(tokens, self.decode_rate)
    }

    /// Returns the number of whole tokens generated within a time. This is the exact inverse of
    /// [`Settings::decode`]: the most tokens whose time does not exceed `time`.
    pub(crate) fn decoded_within(&self, time: Nanos) -> u64 {
        let mut tokens = (time as f64 / SECOND * self.decode_rate) as u64;
        while tokens > 0 && self.decode(tokens) > time {
            tokens -= 1;
        }
        while self.decode(tokens + 1) <= time {
            tokens += 1;
        }
        tokens
    }

    /// Returns the number of granules that hold `tokens` tokens. The size in bytes saturates: a
    /// size beyond 64 bits does not fit in any memory.
    pub(crate) fn granules(&self, tokens: u64, granule: u64) -> u64 {
        tokens
            .saturating_mul(self.kv_bytes_per_token)
            .div_ceil(granule.max(1))
    }

    pub(crate) fn tokens_in(&self, granules: u64, granule: u64) -> u64 {
        granules.saturating_mul(granule) / self.kv_bytes_per_token.max(1)
    }
}

fn nanos(tokens: u64, rate: f64) -> Nanos {
    (tokens as f64 * SECOND / rate).round() as Nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_what_the_rates_say() {
        let settings = Settings::default();
        assert_eq!(settings.prefill(8_000), 1_000_000_000);
        assert_eq!(settings.decode(1), 25_000_000);
        assert_eq!(settings.decode(0), 0);
    }

    #[test]
    fn decoded_within_is_the_inverse_of_decode() {
        for rate in [40.0, 7.3, 1.0, 12_345.6, 1e6] {
            let settings = Settings {
                decode_rate: rate,
                ..Settings::default()
            };
            for tokens in [0, 1, 2, 3, 39, 40, 41, 1_000, 4_000_000] {
                let time = settings.decode(tokens);
                assert_eq!(settings.decoded_within(time), tokens, "{tokens} at {rate}");
                if time > 0 {
                    assert_eq!(
                        settings.decoded_within(time - 1),
                        tokens - 1,
                        "{tokens} at {rate}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_granule_is_asked_for_when_a_token_begins_in_it() {
        let settings = Settings {
            kv_bytes_per_token: 3,
            ..Settings::default()
        };
        assert_eq!(settings.granules(0, 8), 0);
        assert_eq!(settings.granules(2, 8), 1);
        assert_eq!(settings.granules(3, 8), 2);
        assert_eq!(settings.tokens_in(1, 8), 2);
        assert_eq!(settings.granules(u64::MAX, 8), u64::MAX / 8 + 1);
    }
}
