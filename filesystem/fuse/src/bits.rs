//! Sets of flags.

/// A set of flags as a type of its own, with a constant for each flag.
macro_rules! flag_set {
    ($(#[$doc:meta])* $set:ident($raw:ty) { $($(#[$flag_doc:meta])* $flag:ident = $bit:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $set($raw);

        impl $set {
            $($(#[$flag_doc])* pub const $flag: Self = Self(1 << $bit);)*

            /// No flag.
            pub const NONE: Self = Self(0);

            /// The set with these bits, also unknown ones.
            pub const fn from_bits(bits: $raw) -> Self {
                Self(bits)
            }

            /// As on the wire.
            pub const fn bits(self) -> $raw {
                self.0
            }

            /// Whether all flags of `other` are in this set.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Flags of either set.
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// `other` if `condition` holds, besides the flags of this set.
            pub const fn with_if(self, condition: bool, other: Self) -> Self {
                if condition { self.with(other) } else { self }
            }

            /// Flags that are in both sets.
            pub const fn intersection(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }

        impl std::fmt::Debug for $set {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut set = f.debug_set();
                let mut rest = self.0;
                $(
                    if self.contains(Self::$flag) {
                        set.entry(&format_args!(stringify!($flag)));
                        rest &= !(1 << $bit);
                    }
                )*
                if rest != 0 {
                    set.entry(&format_args!("{rest:#x}"));
                }
                set.finish()
            }
        }
    };
}

pub(crate) use flag_set;
