//! The Rust form of a C enumeration: an integer with names for the known values.
//!
//! A Rust `enum` that receives a value outside its list is undefined behavior, and the driver's
//! lists grow with every release. The integer keeps any value, and prints it.

/// Declares an integer newtype for a C enumeration, with an associated constant for each known
/// value under its C name, and the list of both for the checks in [`crate::abi`].
macro_rules! c_enum {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$doc:meta])* $value_name:ident = $value:literal, )*
        }
    ) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub core::ffi::c_int);

        impl $name {
            $(
                $(#[$doc])*
                #[doc = concat!("`", stringify!($value_name), "` is ", $value, ".")]
                pub const $value_name: Self = Self($value);
            )*

            /// Every value that this crate has a name for, with the name.
            pub const KNOWN: &'static [(&'static str, Self)] =
                &[$( (stringify!($value_name), Self::$value_name), )*];

            /// Returns the C name of this value, or `None` if this crate does not know the value.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                Self::KNOWN
                    .iter()
                    .find(|(_, known)| *known == self)
                    .map(|(name, _)| *name)
            }
        }

        /// Writes the C name, or the number where the value has no name here.
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => core::fmt::Display::fmt(&self.0, f),
                }
            }
        }

        /// Writes the C name and the number.
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{name}({})", self.0),
                    None => write!(f, concat!(stringify!($name), "({})"), self.0),
                }
            }
        }
    };
}

pub(crate) use c_enum;
