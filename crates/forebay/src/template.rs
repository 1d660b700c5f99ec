//! Templates: what a datablock holds (PTask section 4.1).

use crate::error::{Error, Result};

use half::f16;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 16-bit float.
    F16,
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// A record of that many bytes.
    Record(u32),
}

impl Elem {
    /// Size in bytes.
    pub const fn size(self) -> usize {
        match self {
            Elem::U8 | Elem::I8 => 1,
            Elem::U16 | Elem::I16 | Elem::F16 => 2,
            Elem::U32 | Elem::I32 | Elem::F32 => 4,
            Elem::U64 | Elem::I64 | Elem::F64 => 8,
            Elem::Record(n) => n as usize,
        }
    }

    /// All of one number.
    pub const NUMBERS: [Elem; 11] = [
        Elem::U8,
        Elem::I8,
        Elem::U16,
        Elem::I16,
        Elem::U32,
        Elem::I32,
        Elem::U64,
        Elem::I64,
        Elem::F16,
        Elem::F32,
        Elem::F64,
    ];

    /// Name in messages and graph files.
    pub fn name(self) -> String {
        match self {
            Elem::Record(n) => format!("record{n}"),
            other => format!("{other:?}").to_lowercase(),
        }
    }

    /// The type of that name.
    pub fn parse(s: &str) -> Option<Elem> {
        let record = || s.strip_prefix("record").and_then(|n| n.parse().ok()).filter(|&n| n > 0).map(Elem::Record);
        Self::NUMBERS.into_iter().find(|e| e.name() == s).or_else(record)
    }
}

/// A Rust type that can be an element.
pub trait Element: bytemuck::Pod {
    /// Its element type.
    const ELEM: Elem;
}

macro_rules! elements {
    ($($t:ty => $e:ident),*) => { $(impl Element for $t { const ELEM: Elem = Elem::$e; })* };
}
elements!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64);
elements!(f16 => F16, f32 => F32, f64 => F64);

/// How the elements are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// An array of fixed dimensions.
    Array,
    /// At most so many elements; each datablock says how many it has.
    Records,
    /// At most so many bytes, without structure.
    Bytes,
}

/// The type of a port's datablocks: element, arrangement, dimensions, stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Template {
    /// Element type.
    pub elem: Elem,
    /// Arrangement.
    pub layout: Layout,
    /// Elements in x, y, z; for records and bytes x is the largest number.
    pub dims: [usize; 3],
    /// Bytes from one row to the next; 0 for rows without gaps.
    pub stride: usize,
}

impl Template {
    /// Largest datablock: 64 GiB.
    pub const MAX_BYTES: usize = 1 << 36;

    /// An array of up to three dimensions: `Template::array::<f32>([640, 480])`.
    pub fn array<T: Element>(dims: impl AsRef<[usize]>) -> Self {
        Self::array_of(T::ELEM, dims)
    }

    /// As [`Template::array`], with the element type as a value. Dimensions past the third make it invalid.
    pub fn array_of(elem: Elem, dims: impl AsRef<[usize]>) -> Self {
        let d = dims.as_ref();
        let at = |i: usize| d.get(i).copied().unwrap_or(1);
        let z = if d.len() > 3 { usize::MAX } else { at(2) };
        Template { elem, layout: Layout::Array, dims: [at(0), at(1), z], stride: 0 }
    }

    /// One element: a scalar.
    pub fn scalar<T: Element>() -> Self {
        Self::array::<T>([1])
    }

    /// At most `max` elements.
    pub fn records<T: Element>(max: usize) -> Self {
        Self::records_of(T::ELEM, max)
    }

    /// As [`Template::records`], with the element type as a value.
    pub fn records_of(elem: Elem, max: usize) -> Self {
        Template { elem, layout: Layout::Records, dims: [max, 1, 1], stride: 0 }
    }

    /// At most `max` bytes.
    pub fn raw(max: usize) -> Self {
        Template { elem: Elem::U8, layout: Layout::Bytes, dims: [max, 1, 1], stride: 0 }
    }

    /// The same with rows `stride` bytes apart.
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// Bytes from one row to the next.
    pub fn row_bytes(&self) -> usize {
        if self.stride != 0 { self.stride } else { self.dims[0].saturating_mul(self.elem.size()) }
    }

    /// Bytes of a datablock of the largest size; saturates, and [`Template::validate`] refuses what saturates.
    pub fn bytes(&self) -> usize {
        self.row_bytes().saturating_mul(self.dims[1]).saturating_mul(self.dims[2])
    }

    /// Elements of a datablock of the largest size.
    pub fn elements(&self) -> usize {
        self.dims.iter().fold(1usize, |a, &b| a.saturating_mul(b))
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// [`Error::Size`] for a zero dimension, a stride shorter than a row or not a multiple of the element, records or bytes in
    /// rows, or more than [`Template::MAX_BYTES`].
    pub fn validate(&self, what: &str) -> Result<()> {
        let bad = |why: String| Err(Error::Size { what: format!("template of {what}"), why });
        if self.dims.contains(&0) || self.elem.size() == 0 {
            return bad(format!("a dimension of {self} is zero"));
        }
        if self.layout != Layout::Array && (self.dims[1..] != [1, 1] || self.stride != 0) {
            return bad(format!("{self} has rows, and only arrays have"));
        }
        if self.stride != 0
            && (self.stride < self.dims[0].saturating_mul(self.elem.size())
                || !self.stride.is_multiple_of(self.elem.size()))
        {
            return bad(format!("stride {} does not hold a row of {self}", self.stride));
        }
        if self.bytes() > Self::MAX_BYTES {
            return bad(format!("{self} is larger than {} B", Self::MAX_BYTES));
        }
        Ok(())
    }

    /// Why a port of template `to` cannot take what `self` gives, if it cannot: equal elements, layout, dimensions and
    /// strides are needed; records and bytes may be shorter.
    pub fn differs(&self, to: &Template) -> Option<String> {
        if self.elem != to.elem {
            return Some(format!("elements differ: {} and {}", self.elem.name(), to.elem.name()));
        }
        if self.layout != to.layout {
            return Some(format!("layouts differ: {:?} and {:?}", self.layout, to.layout));
        }
        if self.layout == Layout::Array {
            if self.dims != to.dims {
                return Some(format!("dimensions differ: {:?} and {:?}", self.dims, to.dims));
            }
            if self.row_bytes() != to.row_bytes() {
                return Some(format!("strides differ: {} and {}", self.row_bytes(), to.row_bytes()));
            }
        } else if self.elements() > to.elements() {
            return Some(format!("up to {} do not fit into {}", self.elements(), to.elements()));
        }
        None
    }
}

/// As in a graph file: `f32[640x480]`, `f32` (one), `f32[640x480] stride 4096` (bytes from row to row), `f32<=1000` (records),
/// `bytes<=4096`; and as it is printed. Sizes are not validated.
impl std::str::FromStr for Template {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let bad =
            || format!("{s:?} is no type; write f32, f32[640x480], f32[640x480] stride 4096, f32<=1000 or bytes<=4096");
        let elem = |n: &str| {
            let known = || Elem::NUMBERS.map(Elem::name).join(", ");
            Elem::parse(n).ok_or_else(|| format!("unknown element {n:?} in {s:?}; known: {}, recordN", known()))
        };
        let printed = s.trim().strip_prefix('≤').and_then(|rest| rest.split_once(' ')).map(|(max, e)| (e, max));
        if let Some((e, max)) = s.split_once("<=").or(printed) {
            let max: usize = max.trim().parse().map_err(|_| bad())?;
            return if e.trim() == "bytes" {
                Ok(Template::raw(max))
            } else {
                Ok(Template::records_of(elem(e.trim())?, max))
            };
        }
        let (array, stride) = match s.rsplit_once("stride") {
            Some((array, n)) => (array.trim(), n.trim().parse().map_err(|_| bad())?),
            None => (s.trim(), 0),
        };
        if let Some(one) = Elem::parse(array) {
            return Ok(Template::array_of(one, [1]).with_stride(stride));
        }
        let (e, dims) = array.strip_suffix(']').and_then(|s| s.split_once('[')).ok_or_else(bad)?;
        let dims = dims
            .split(['x', '×'])
            .map(|d| d.trim().parse::<usize>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| bad())?;
        if dims.len() > 3 {
            return Err(format!("{s:?} has more than three dimensions"));
        }
        Ok(Template::array_of(elem(e.trim())?, dims).with_stride(stride))
    }
}

impl std::fmt::Display for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let e = self.elem.name();
        let [x, y, z] = self.dims;
        match self.layout {
            Layout::Array if z != 1 => write!(f, "{e}[{x}×{y}×{z}]")?,
            Layout::Array if y != 1 => write!(f, "{e}[{x}×{y}]")?,
            Layout::Array => write!(f, "{e}[{x}]")?,
            Layout::Records => write!(f, "≤{x} {e}")?,
            Layout::Bytes => write!(f, "≤{x} bytes")?,
        }
        if self.stride != 0 { write!(f, " stride {}", self.stride) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_or_vanish_are_refused() {
        for t in [
            Template::array::<f64>([usize::MAX, 2]),
            Template::array::<u8>([0]),
            Template::array::<u8>([1, 1, 1, 1]),
            Template::raw(Template::MAX_BYTES + 1),
            Template::array::<f32>([10, 10]).with_stride(39),
            Template::array::<f32>([10, 10]).with_stride(42),
        ] {
            assert!(t.validate("test").is_err(), "{t}");
        }
        assert!(Template::array::<f32>([10, 10]).with_stride(64).validate("test").is_ok());
    }

    #[test]
    fn names_come_back() {
        for e in Elem::NUMBERS.into_iter().chain([Elem::Record(12)]) {
            assert_eq!(Elem::parse(&e.name()), Some(e));
        }
        assert_eq!(Elem::parse("record0"), None);
    }

    #[test]
    fn words_are_templates_or_refused_with_what_would_be_one() {
        for (words, template) in [
            ("u64", Template::array::<u64>([1])),
            ("f32[640x480]", Template::array::<f32>([640, 480])),
            // As it is printed.
            ("f32[640×480]", Template::array::<f32>([640, 480])),
            ("record12[2 x 3 x 4]", Template::array_of(Elem::Record(12), [2, 3, 4])),
            ("f32[640x480] stride 4096", Template::array::<f32>([640, 480]).with_stride(4096)),
            (" u8[3] stride 3 ", Template::array::<u8>([3]).with_stride(3)),
            ("u32<=1000", Template::records::<u32>(1000)),
            ("bytes<=4096", Template::raw(4096)),
        ] {
            assert_eq!(words.parse(), Ok(template), "{words}");
            assert_eq!(template.to_string().parse(), Ok(template), "{template}");
        }
        for (words, why) in [
            ("f33", "f32[640x480]"),
            ("f33[2]", "f33"),
            ("u8[1x1x1x1]", "three"),
            ("u8[]", "no type"),
            ("u8[2] stride", "no type"),
            ("≤ u8", "no type"),
        ] {
            assert!(words.parse::<Template>().unwrap_err().contains(why), "{words}");
        }
    }
}
