//! Figures of memory pools, as others see them.

/// The figures that a tenant's pool shows to others, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::mem_pool) struct View {
    /// The bytes that the tenant is charged.
    pub(crate) held: u64,
    pub(crate) in_use: u64,
    /// Bytes for the exchange, which no allocation uses.
    pub(crate) padding: u64,
    /// Bytes that can be given back while the pool is open.
    pub(crate) idle: u64,
    /// Bytes that can be given back once the pool is closed.
    pub(crate) idle_closed: u64,
    pub(crate) older: u64,
    /// Bytes that the driver was last seen to hold.
    pub(crate) reserved: u64,
}
