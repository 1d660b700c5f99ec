//! Devices as people name them.

use std::str::FromStr;
use std::sync::Arc;

use crate::{Device, Error, Kind, Result, discover};

/// The devices of a kind, or one of them: "cuda", "cuda:1".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Kind.
    pub kind: Kind,
    /// Which one, counted from 0 as [`discover`] lists those of this kind alone; none for all.
    pub number: Option<usize>,
}

impl Wanted {
    /// Opens them.
    ///
    /// # Errors
    /// The reason why there is none; [`Error::NoDevice`], with those that there are, when there are not so many.
    pub fn find(self) -> Result<Vec<Arc<dyn Device>>> {
        let Wanted { kind, number } = self;
        let (mut found, missing) = discover(&[kind]);
        if found.is_empty() {
            let why = missing.into_iter().next().map(|(_, e)| e);
            return Err(why.unwrap_or_else(|| Error::NoDevice { kind, why: "none was found".into() }));
        }
        let Some(n) = number else { return Ok(found) };
        if n >= found.len() {
            let all = found.iter().enumerate().map(|(i, d)| format!("{kind}:{i} {}", d.info().name));
            let why = format!("there is no {kind}:{n}, only {}", all.collect::<Vec<_>>().join(", "));
            return Err(Error::NoDevice { kind, why });
        }
        Ok(vec![found.swap_remove(n)])
    }
}

impl From<Kind> for Wanted {
    fn from(kind: Kind) -> Self {
        Wanted { kind, number: None }
    }
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let Some((kind, number)) = s.split_once(':') else { return Ok(s.parse::<Kind>()?.into()) };
        let kind = kind.parse()?;
        let number =
            number.parse().map_err(|_| format!("device {s:?}: {number:?} is no number; write \"{kind}:0\""))?;
        Ok(Wanted { kind, number: Some(number) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_kinds_and_numbers() {
        assert_eq!("cuda".parse(), Ok(Wanted::from(Kind::Cuda)));
        assert_eq!("opencl:12".parse(), Ok(Wanted { kind: Kind::OpenCl, number: Some(12) }));
        for (text, told) in
            [("gpu:0", "unknown"), ("cuda:", "no number"), ("cuda:-1", "no number"), ("cuda:x", "cuda:0")]
        {
            let why = text.parse::<Wanted>().unwrap_err();
            assert!(why.contains(told), "{text}: {why}");
        }
        let one = Wanted { kind: Kind::Cpu, number: Some(0) };
        assert_eq!(one.find().unwrap().len(), 1);
        let why = Wanted { number: Some(1), ..one }.find().err().unwrap().to_string();
        assert!(why.contains("there is no cpu:1, only cpu:0 "), "{why}");
    }
}
