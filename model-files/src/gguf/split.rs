//! Models that are split over several GGUF files, as llama.cpp's `gguf-split` does: NAME-00001-of-00003.gguf and so on. The
//! first part has the metadata; each has its number (`split.no`, from 0), the number of parts (`split.count`) and the number
//! of tensors of all parts together (`split.tensors.count`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::{GgufFile, GgufProblem, Header};
use crate::error::ModelFilesError;
use crate::map::FileMap;

/// The most missing parts that a message lists.
const MOST_NAMED: usize = 8;
/// Digits of a part's number in its name.
const DIGITS: usize = 5;

/// What a part's file name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartName<'a> {
    /// What is before the numbers.
    pub(crate) stem: &'a str,
    /// From 1 on.
    number: u32,
    count: u32,
}

impl<'a> PartName<'a> {
    /// Reads `NAME-00001-of-00003.gguf`; `None` if a file is called otherwise.
    pub(crate) fn read(path: &'a Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let digits = |text: &str| {
            let plain = text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit());
            text.parse().ok().filter(|_| plain)
        };
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count): (u32, u32) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self { stem, number, count })
    }

    /// Where part `number` is, beside this one.
    fn sibling(&self, path: &Path, number: u32) -> PathBuf {
        path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}

/// Opens a file, or all parts of the split model that it is a part of.
pub(super) fn open(path: &Path) -> Result<GgufFile, ModelFilesError> {
    let (map, header) = open_one(path)?;
    let parts = header.get(&map, "split.count").map(|value| value.as_u64());
    let parts = match parts {
        None | Some(Some(0 | 1)) => {
            let maps = vec![map];
            return Ok(GgufFile { maps, header });
        }
        Some(parts) => parts,
    };
    let Some(name) = PartName::read(path) else {
        let problem = GgufProblem::SplitName(parts.unwrap_or(0));
        return Err(ModelFilesError::gguf(path, problem));
    };
    if parts != Some(u64::from(name.count)) {
        let problem = wrong(
            &header,
            &map,
            "split.count",
            format!("{}, as the file's name says,", name.count),
        );
        return Err(ModelFilesError::gguf(path, problem));
    }
    drop(map);
    let paths: Vec<PathBuf> = (1..=name.count).map(|number| name.sibling(path, number)).collect();
    let missing: Vec<String> = paths
        .iter()
        .filter(|part| !part.is_file())
        .map(|part| named(part))
        .collect();
    if !missing.is_empty() {
        let (all, some) = (missing.len(), missing[..missing.len().min(MOST_NAMED)].join(", "));
        let what = format!(
            "is one of {} parts of a model, of which {all} are not beside it: {some}",
            name.count
        );
        return Err(ModelFilesError::invalid(path, what));
    }
    join(&paths)
}

fn open_one(path: &Path) -> Result<(FileMap, Header), ModelFilesError> {
    let map = FileMap::open(path)?;
    let header = Header::parse(&map).map_err(|problem| ModelFilesError::gguf(path, problem))?;
    Ok((map, header))
}

/// Opens all parts, checks what they say of each other, and makes one of them.
fn join(paths: &[PathBuf]) -> Result<GgufFile, ModelFilesError> {
    let mut tensors = None;
    let mut whole: Option<GgufFile> = None;
    for (index, path) in paths.iter().enumerate() {
        let (map, header) = open_one(path)?;
        let says = |key: &'static str, right: u64, why: String| {
            if header.get(&map, key).and_then(|value| value.as_u64()) == Some(right) {
                return Ok(());
            }
            let problem = wrong(&header, &map, key, format!("{right}, {why},"));
            Err(ModelFilesError::gguf(path, problem))
        };
        says("split.count", paths.len() as u64, "as the file's name says".to_owned())?;
        says(
            "split.no",
            index as u64,
            format!("as this is part {} by its name", index + 1),
        )?;
        let count = header.get(&map, "split.tensors.count");
        let count = count.and_then(|value| value.as_u64());
        match (tensors, count) {
            (Some(first), found) if found != Some(first) => {
                says("split.tensors.count", first, format!("as {} says", named(&paths[0])))?;
            }
            _ => tensors = count,
        }
        match &mut whole {
            None => {
                whole = Some(GgufFile {
                    maps: vec![map],
                    header,
                })
            }
            Some(whole) => {
                let absorbed = whole.header.absorb(header, index);
                absorbed.map_err(|tensor| {
                    ModelFilesError::invalid(
                        path,
                        format!("tensor `{tensor}` is also in an earlier part of the model"),
                    )
                })?;
                whole.maps.push(map);
            }
        }
    }
    let whole = whole.ok_or_else(|| ModelFilesError::invalid(Path::new(""), "a model has at least one part"))?;
    let found = whole.tensors().len() as u64;
    if tensors != Some(found) {
        let problem = GgufProblem::SplitValue {
            key: "split.tensors.count",
            found: tensors.map_or_else(|| "missing".to_owned(), |count| count.to_string()),
            right: format!("{found}, as many as the {} parts have,", paths.len()),
        };
        return Err(ModelFilesError::gguf(&paths[0], problem));
    }
    Ok(whole)
}

/// A key of a part that should have another value.
fn wrong(header: &Header, map: &FileMap, key: &'static str, right: String) -> GgufProblem {
    let found = match header.get(map, key) {
        Some(value) => value
            .as_u64()
            .map_or_else(|| value.describe(), |number| number.to_string()),
        None => "missing".to_owned(),
    };
    GgufProblem::SplitValue { key, found, right }
}

fn named(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// The GGUF file of a directory that holds one model in this format; of a split model, the first part that is there.
///
/// # Errors
/// If there are several models.
pub(crate) fn only_model(directory: &Path) -> Result<Option<PathBuf>, ModelFilesError> {
    let io = |source| ModelFilesError::Io {
        path: directory.to_path_buf(),
        source,
    };
    let mut models: BTreeMap<(String, u32), PathBuf> = BTreeMap::new();
    for entry in fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_none_or(|ending| ending != "gguf") || !path.is_file() {
            continue;
        }
        let part = PartName::read(&path);
        let model = part.map_or_else(|| (named(&path), 0), |part| (part.stem.to_owned(), part.count));
        let known = models.entry(model).or_insert_with(|| path.clone());
        if path < *known {
            *known = path;
        }
    }
    if models.len() > 1 {
        let names: Vec<String> = models.values().take(MOST_NAMED).map(|path| named(path)).collect();
        let what = format!(
            "holds {} models as GGUF files, among them {}; give the path of one of them",
            models.len(),
            names.join(", ")
        );
        return Err(ModelFilesError::invalid(directory, what));
    }
    Ok(models.into_values().next())
}

#[cfg(test)]
mod tests;
