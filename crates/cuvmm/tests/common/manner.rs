//! The manner of every stand-in that a test makes: `CUVMM_MANNER=measured`, which is the default,
//! `strict` or `hostile`. What a test asserts holds in all of them.

use cuvmm::driver::model::Manner;

pub fn manner() -> Manner {
    match std::env::var("CUVMM_MANNER").as_deref() {
        Err(_) | Ok("" | "measured") => Manner::AsMeasured,
        Ok("strict") => Manner::Strict,
        Ok("hostile") => Manner::Hostile,
        Ok(other) => panic!("CUVMM_MANNER={other}: measured, strict or hostile"),
    }
}
