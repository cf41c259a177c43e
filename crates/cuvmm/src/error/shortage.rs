//! The figures of a refusal for lack of memory.

use std::fmt;

/// The figures of a refusal. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// Who asked.
    pub tenant: String,
    /// What the request was to bring into use, in whole granules.
    pub wanted: u64,
    /// How much of that could be had right now, with everything taken back that can be without
    /// waiting and without pressure hooks: a request for so much succeeds, and one for a granule
    /// more fails, as long as nothing changes in between. Always less than was wanted.
    ///
    /// It is a total. A request may fail below it where mappings or addresses are short, or where
    /// blocks of other sizes than the one that was refused strand memory on their way; and one may
    /// get more that has the shape, and the home stream, of a block that was freed on that stream
    /// a moment ago, since that one's memory is the stream's before its work has passed.
    pub available: u64,
    /// The largest single extent that could be made right now without taking anything back.
    pub largest_run: u64,
    /// The pool's limit.
    pub limit: u64,
    /// The tenant's own limit.
    pub tenant_limit: u64,
    /// What the tenant holds.
    pub tenant_held: u64,
    /// What is kept for other tenants' guarantees.
    pub guaranteed_to_others: u64,
    /// What can be taken back once GPU work has passed.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// What is withdrawn but leased.
    pub leased: u64,
    /// What is idle in one extent with bytes in use: it can be taken back when those are given up,
    /// and waiting does not help.
    pub stranded: u64,
    /// What could not be taken back after a failure.
    pub quarantined: u64,
    /// The other tenants and what each holds, largest first.
    pub holders: Vec<(String, u64)>,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} wants {} bytes more and can have {}: it holds {} of at most {}, the pool's limit is {}, \
             {} are kept for other tenants' guarantees, {} are pending free, {} leased, {} stranded, \
             {} quarantined, the largest free run is {}",
            self.tenant,
            self.wanted,
            self.available,
            self.tenant_held,
            self.tenant_limit,
            self.limit,
            self.guaranteed_to_others,
            self.pending_free,
            self.leased,
            self.stranded,
            self.quarantined,
            self.largest_run,
        )?;
        for (index, (name, held)) in self.holders.iter().take(8).enumerate() {
            f.write_str(if index == 0 { "; held by " } else { ", " })?;
            write!(f, "{name:?} {held}")?;
        }
        Ok(())
    }
}
