//! The manner of all stand-ins in a test run: `CUVMM_MANNER=measured`, the default, `strict` or
//! `hostile`. The assertions of the tests hold in all of them.

use cuvmm::driver::model::Manner;

pub fn manner() -> Manner {
    match std::env::var("CUVMM_MANNER").as_deref() {
        Err(_) | Ok("" | "measured") => Manner::AsMeasured,
        Ok("strict") => Manner::Strict,
        Ok("hostile") => Manner::Hostile,
        Ok(other) => panic!("CUVMM_MANNER={other}: measured, strict or hostile"),
    }
}
