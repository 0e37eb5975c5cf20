//! What the loader, the checks and the reference know about one field; and the macro that writes a section once.

/// One configuration field: the only place its name, its meaning and its legal values are stated.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Key within its section, with the unit as its last word.
    pub name: &'static str,
    /// One line: what it does, in which unit.
    pub doc: &'static str,
    /// Which values are legal.
    pub kind: Kind,
}

/// A section of the configuration and its fields, in file order.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The section's name in files, in variables and in `--set`.
    pub name: &'static str,
    /// What the section is about.
    pub doc: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
}

impl Section {
    /// The field called `name`.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.name == name)
    }
}

/// The legal values of a field.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number between two bounds, both included.
    Int {
        /// Smallest legal value.
        min: i64,
        /// Largest legal value.
        max: i64,
    },
    /// One string.
    Text(Text),
    /// A list of strings.
    List {
        /// What each element must look like.
        item: Text,
        /// Fewest elements.
        min_items: usize,
    },
    /// One of a few words.
    Choice(&'static [&'static str]),
}

/// What a string must look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Text {
    /// Anything, also nothing.
    Any,
    /// At least one character, no control characters.
    NonEmpty,
    /// An address to bind: `IP:port`; port 0 takes any free port.
    BindAddress,
    /// Like [`Text::BindAddress`], or empty.
    OptionalBindAddress,
    /// An address to dial: `host:port`, the port not 0.
    DialAddress,
    /// Like [`Text::DialAddress`], or empty.
    OptionalDialAddress,
    /// `http://host:port` or `https://host:port`, without path, user or query.
    HttpUrl,
    /// A path, or a model on a hub (see [`HubReference`](crate::HubReference)).
    ModelPath,
    /// `http://HOST` or `https://HOST`, with a port and a path or without, without user or query.
    Url,
    /// `http://host:port` without path, user or query, or empty.
    CollectorUrl,
    /// A node's name: up to 64 of `a-z A-Z 0-9 . _ -`, or empty.
    NodeName,
    /// `name=path`: an adapter's name, of 1 to 256 letters, digits or any of `. - _ /` and not `None`, and where it is. No
    /// two of a list have the same name.
    Adapter,
    /// CPU cores: numbers and ranges with commas between them, or empty.
    Cores,
    /// A secret: at least 16 visible ASCII characters; never printed.
    Secret,
    /// A secret that others have made: visible ASCII characters, or none; never printed.
    Token,
}

/// A whole number from `min` to `max`.
pub(crate) const fn int(min: i64, max: i64) -> Kind {
    Kind::Int { min, max }
}

/// Milliseconds: 1 to a day.
pub(crate) const fn millis() -> Kind {
    Kind::Int {
        min: 1,
        max: 86_400_000,
    }
}

/// Writes a section: the struct with its documentation, its defaults and its field table, from one listing.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])+
        $section:ident = $section_name:literal {
            $( $(#[doc = $doc:literal])+ $field:ident : $type:ty = $default:expr, $kind:expr; )+
        }
    ) => {
        $(#[doc = $section_doc])+
        #[derive(Clone, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $section {
            $( $(#[doc = $doc])+ pub $field: $type, )+
        }

        impl Default for $section {
            fn default() -> Self {
                Self { $( $field: $default, )+ }
            }
        }

        impl $section {
            /// The section's name and fields, as the loader and the reference read them.
            pub const SECTION: $crate::field::Section = $crate::field::Section {
                name: $section_name,
                doc: concat!($($section_doc),+),
                fields: &[ $( $crate::field::Field {
                    name: stringify!($field),
                    doc: concat!($($doc),+),
                    kind: $kind,
                }, )+ ],
            };
        }
    };
}
pub(crate) use section;
