//! The figures of a refusal for lack of memory.

use std::fmt;

use super::LedgerShortage;
use crate::display::{Bytes, Count, SetBy, Table};

/// The figures of a refused request, of a pool or of a [region](crate::Region) in no tenant. All
/// sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Shortage {
    /// The tenant that made the request. Empty for a region in no tenant.
    pub tenant: String,
    /// The bytes that the request would bring into use, in whole granules.
    pub wanted: u64,
    /// The bytes that could be had right now, with everything reclaimed that can be without waiting
    /// and without pressure hooks. A request for this size succeeds, and one for a granule more
    /// fails, as long as nothing changes in between. Always less than `wanted`.
    ///
    /// It is a total. A smaller request may fail if mappings or addresses are short, or if
    /// reclaimed blocks of other sizes strand memory. A larger one may succeed with the shape and
    /// home stream of a block just freed on that stream, which can reuse the block's memory before
    /// its fence is complete.
    ///
    /// For a region in no tenant it is what the driver reports as free after the refusal
    /// (`cuMemGetInfo`), or 0 if it does not say.
    pub available: u64,
    /// The largest single extent that could be created right now without reclaiming. Not known, and
    /// 0, for a region in no tenant.
    pub largest_run: u64,
    /// The pool's limit. For a region in no tenant, the device's memory.
    pub limit: u64,
    /// The tenant's own limit. For a region in no tenant, the device's memory.
    pub tenant_limit: u64,
    /// The bytes that the tenant, or the region in no tenant, holds.
    pub tenant_held: u64,
    /// The bytes kept for other tenants' guarantees.
    pub guaranteed_to_others: u64,
    /// The bytes that can be reclaimed once GPU work is complete.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// The bytes that are withdrawn but leased.
    pub leased: u64,
    /// The idle bytes in extents that also have bytes in use, and the free bytes of heaps for
    /// graphs. They can be reclaimed when those are freed or the graphs end; waiting does not help.
    pub stranded: u64,
    /// The bytes that could not be unmapped after a failure.
    pub quarantined: u64,
    /// The other tenants with the bytes that each holds, largest first.
    pub holders: Vec<(String, u64)>,
    /// The figures of the [ledger](crate::ledger) that the pool shares with other processes, if it
    /// refused.
    pub ledger: Option<LedgerShortage>,
    /// The option that sets the device's memory, if that memory is the limit that was reached and the
    /// device no GPU: `HostOptions::capacity` on the host driver. `None` if the tenant's own limit was
    /// reached, or the ledger refused.
    pub memory_set_by: Option<&'static str>,
}

impl Shortage {
    /// Returns the relevant figures as one line, for a log or inside another message: the
    /// limits, the figures that are not zero, and the three largest holders. `Display` shows all
    /// figures, over several lines.
    pub fn summary(&self) -> impl fmt::Display + '_ {
        Summary(self)
    }

    /// Returns the figures of a region in no tenant that needs `wanted` bytes and holds `held`, on a
    /// device that has `free` of `limit` bytes.
    pub(crate) const fn of_region(wanted: u64, held: u64, (free, limit): (u64, u64)) -> Self {
        Self {
            tenant: String::new(),
            wanted,
            available: free,
            largest_run: 0,
            limit,
            tenant_limit: limit,
            tenant_held: held,
            guaranteed_to_others: 0,
            pending_free: 0,
            leased: 0,
            stranded: 0,
            quarantined: 0,
            holders: Vec::new(),
            ledger: None,
            memory_set_by: None,
        }
    }

    const fn is_of_region(&self) -> bool {
        self.tenant.is_empty()
    }

    fn heading(&self) -> String {
        let (tenant, wanted, available) = (&self.tenant, Bytes(self.wanted), Bytes(self.available));
        match self.is_of_region() {
            true => format!("a region needs {wanted} more, {available} free"),
            false => format!("tenant {tenant:?} needs {wanted} more, {available} available"),
        }
    }

    /// Returns why memory is stranded and what helps, if the request would fit in what is.
    fn stranding(&self) -> Option<&'static str> {
        let decides =
            self.stranded > 0 && self.available.saturating_add(self.stranded) >= self.wanted;
        decides.then_some(
            "an extent is mapped as a whole, so its free part is stranded while the rest is in use: \
             smaller extents, or another heap or tag for memory that lives longer, leave whole extents free; \
             a heap for graphs keeps all extents until its graphs end",
        )
    }

    /// The figures that may explain the refusal, each with its name.
    fn figures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let figures = [
            ("kept for others' guarantees", self.guaranteed_to_others),
            ("pending on GPU work", self.pending_free),
            ("kept by leases", self.leased),
            ("stranded in extents in use", self.stranded),
            ("quarantined", self.quarantined),
        ];
        figures.into_iter().filter(|&(_, bytes)| bytes > 0)
    }
}

/// Shows a table: the request, the limits, each figure that is not zero, and the other tenants.
impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.heading())?;
        let limit = Bytes(self.limit).to_string();
        if self.is_of_region() {
            let mut table = Table::new(["memory of the device", &limit]);
            let held = Bytes(self.tenant_held).to_string();
            table.row(["held by the region".to_owned(), held]);
            return write!(f, "{table}{}", SetBy(self.memory_set_by));
        }
        let mut table = Table::new(["limit of the pool", &limit]);
        let mut row = |name: String, bytes| table.row([name, Bytes(bytes).to_string()]);
        row("limit of the tenant".to_owned(), self.tenant_limit);
        row("held by the tenant".to_owned(), self.tenant_held);
        for (name, held) in &self.holders {
            row(format!("held by {name:?}"), *held);
        }
        for (name, bytes) in self.figures() {
            row(name.to_owned(), bytes);
        }
        row("largest free extent".to_owned(), self.largest_run);
        table.fmt(f)?;
        if let Some(reason) = self.stranding() {
            write!(f, "\n{reason}")?;
        }
        if let Some(ledger) = self.ledger {
            write!(f, "\n{ledger}")?;
        }
        SetBy(self.memory_set_by).fmt(f)
    }
}

/// The holders that a summary names.
const LARGEST: usize = 3;

struct Summary<'a>(&'a Shortage);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shortage = self.0;
        let (held, most) = (Bytes(shortage.tenant_held), Bytes(shortage.tenant_limit));
        let (heading, limit) = (shortage.heading(), Bytes(shortage.limit));
        let set_by = SetBy(shortage.memory_set_by);
        if shortage.is_of_region() {
            return write!(f, "{heading} (of {limit}, the region holds {held}){set_by}");
        }
        write!(
            f,
            "{heading} (limit {limit}, tenant holds {held} of at most {most}"
        )?;
        for (name, bytes) in shortage.figures() {
            write!(f, ", {} {name}", Bytes(bytes))?;
        }
        for (name, held) in shortage.holders.iter().take(LARGEST) {
            write!(f, ", {} held by {name:?}", Bytes(*held))?;
        }
        match shortage.holders.len().saturating_sub(LARGEST) {
            0 => {}
            more => write!(f, ", the rest by {}", Count(more, "more tenant"))?,
        }
        f.write_str(")")?;
        if let Some(reason) = shortage.stranding() {
            write!(f, "; {reason}")?;
        }
        if let Some(ledger) = shortage.ledger {
            write!(f, "; {ledger}")?;
        }
        set_by.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::Shortage;

    const MIB: u64 = 1 << 20;

    fn shortage() -> Shortage {
        Shortage {
            tenant: "chat".to_owned(),
            wanted: 6 * MIB,
            available: 2 * MIB,
            largest_run: 2 * MIB,
            limit: 64 * MIB,
            tenant_limit: 64 * MIB,
            tenant_held: 40 * MIB,
            guaranteed_to_others: 0,
            pending_free: 8 * MIB,
            leased: 0,
            stranded: 0,
            quarantined: 0,
            holders: vec![("code".to_owned(), 22 * MIB)],
            ledger: None,
            memory_set_by: None,
        }
    }

    #[test]
    fn a_shortage_is_a_table() {
        assert_eq!(
            shortage().to_string(),
            "tenant \"chat\" needs 6 MiB more, 2 MiB available\n\
             limit of the pool    64 MiB\n\
             limit of the tenant  64 MiB\n\
             held by the tenant   40 MiB\n\
             held by \"code\"       22 MiB\n\
             pending on GPU work   8 MiB\n\
             largest free extent   2 MiB"
        );
    }

    #[test]
    fn a_region_and_the_option_that_sets_its_memory() {
        let mut shortage = Shortage::of_region(6 * MIB, 2 * MIB, (4 * MIB, 8 * MIB));
        let line = "a region needs 6 MiB more, 4 MiB free (of 8 MiB, the region holds 2 MiB)";
        assert_eq!(shortage.summary().to_string(), line);
        shortage.memory_set_by = Some("HostOptions::capacity");
        let option = "; `HostOptions::capacity` sets the device's memory";
        assert_eq!(shortage.summary().to_string(), format!("{line}{option}"));
        assert_eq!(
            shortage.to_string(),
            format!(
                "a region needs 6 MiB more, 4 MiB free\n\
                 memory of the device  8 MiB\n\
                 held by the region    2 MiB{option}"
            )
        );
    }

    #[test]
    fn a_summary_is_one_line() {
        assert_eq!(
            shortage().summary().to_string(),
            "tenant \"chat\" needs 6 MiB more, 2 MiB available (limit 64 MiB, tenant holds 40 MiB of \
             at most 64 MiB, 8 MiB pending on GPU work, 22 MiB held by \"code\")"
        );
    }
}
