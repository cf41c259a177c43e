//! Option bits, which the C functions take as plain integers.

use core::ffi::{c_uchar, c_uint, c_ushort};

macro_rules! flags {
    ($( $(#[$doc:meta])* $name:ident: $ty:ty = $value:literal; )*) => {
        $(
            $(#[$doc])*
            #[doc = concat!("`", stringify!($name), "` is ", $value, ".")]
            pub const $name: $ty = $value;
        )*

        /// Every constant of this file with its value, for [`crate::abi`].
        pub(crate) const KNOWN: &[(&str, i64)] = &[$( (stringify!($name), $value), )*];
    };
}

flags! {
    /// A physical allocation without compression.
    CU_MEM_ALLOCATION_COMP_NONE: c_uchar = 0x0;
    /// A physical allocation with the compression that the device offers.
    CU_MEM_ALLOCATION_COMP_GENERIC: c_uchar = 0x1;

    /// A physical allocation for tiles of a sparse array.
    CU_MEM_CREATE_USAGE_TILE_POOL: c_ushort = 0x1;
    /// A physical allocation that the hardware decompressor may write.
    CU_MEM_CREATE_USAGE_HW_DECOMPRESS: c_ushort = 0x2;

    /// Managed memory that every device and the host may use at any time.
    CU_MEM_ATTACH_GLOBAL: c_uint = 0x1;
    /// Managed memory that only the host may use at first.
    CU_MEM_ATTACH_HOST: c_uint = 0x2;
    /// Managed memory that one stream uses.
    CU_MEM_ATTACH_SINGLE: c_uint = 0x4;

    /// Pinned host memory that counts as pinned in every context.
    CU_MEMHOSTALLOC_PORTABLE: c_uint = 0x01;
    /// Pinned host memory that is mapped into the devices' address space.
    CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 0x02;
    /// Pinned host memory that the processor writes without caching (write-combined).
    CU_MEMHOSTALLOC_WRITECOMBINED: c_uint = 0x04;

    /// A stream that is implicitly ordered with the legacy default stream.
    CU_STREAM_DEFAULT: c_uint = 0x0;
    /// A stream without implicit ordering with the legacy default stream.
    CU_STREAM_NON_BLOCKING: c_uint = 0x1;

    /// An event with timing, for which a waiting thread spins.
    CU_EVENT_DEFAULT: c_uint = 0x0;
    /// An event for which a waiting thread sleeps.
    CU_EVENT_BLOCKING_SYNC: c_uint = 0x1;
    /// An event without timing, which is cheaper.
    CU_EVENT_DISABLE_TIMING: c_uint = 0x2;
    /// An event that other processes may open.
    CU_EVENT_INTERPROCESS: c_uint = 0x4;

    /// A wait for an event with the default behavior.
    CU_EVENT_WAIT_DEFAULT: c_uint = 0x0;

    /// A graph whose launches free the memory that the previous launch left allocated.
    CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH: c_uint = 1;
}
