//! Writes small GGUF files for tests, right and wrong ones.

use super::ggml_type::GgmlType;

/// A metadata value to write.
#[derive(Debug, Clone)]
pub(crate) enum Put {
    U32(u32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    U32s(Vec<u32>),
    /// Type id and bytes as they are.
    Raw(u32, Vec<u8>),
}

impl From<&str> for Put {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<u32> for Put {
    fn from(number: u32) -> Self {
        Self::U32(number)
    }
}

impl From<bool> for Put {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}

/// A tensor to write: its shape fastest dimension first, as in the file.
#[derive(Debug, Clone)]
pub(crate) struct PutTensor {
    pub(crate) name: String,
    pub(crate) dimensions: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) offset: u64,
}

impl PutTensor {
    pub(crate) fn new(name: &str, dimensions: &[u64], kind: GgmlType, offset: u64) -> Self {
        Self {
            name: name.into(),
            dimensions: dimensions.into(),
            kind: kind.id(),
            offset,
        }
    }
}

/// A file in the making.
#[derive(Debug, Clone)]
pub(crate) struct Builder {
    pub(crate) version: u32,
    pub(crate) metadata: Vec<(String, Put)>,
    pub(crate) tensors: Vec<PutTensor>,
    pub(crate) alignment: usize,
    pub(crate) data_bytes: usize,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            metadata: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data_bytes: 0,
        }
    }

    pub(crate) fn put(mut self, key: &str, value: impl Into<Put>) -> Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    pub(crate) fn tensor(mut self, name: &str, dimensions: &[u64], kind: GgmlType, offset: u64) -> Self {
        self.tensors.push(PutTensor::new(name, dimensions, kind, offset));
        self
    }

    pub(crate) fn data(mut self, bytes: usize) -> Self {
        self.data_bytes = bytes;
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut out, key);
            put_value(&mut out, value);
        }
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            for dimension in &tensor.dimensions {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.resize(out.len() + self.data_bytes, 0x5a);
        out
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Put) {
    let mut head = |id: u32, element: Option<(u32, usize)>| {
        out.extend(id.to_le_bytes());
        if let Some((kind, count)) = element {
            out.extend(kind.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        }
    };
    match value {
        Put::U32(number) => {
            head(4, None);
            out.extend(number.to_le_bytes());
        }
        Put::Bool(flag) => {
            head(7, None);
            out.push(u8::from(*flag));
        }
        Put::Str(text) => {
            head(8, None);
            put_string(out, text);
        }
        Put::Strs(texts) => {
            head(9, Some((8, texts.len())));
            texts.iter().for_each(|text| put_string(out, text));
        }
        Put::U32s(numbers) => {
            head(9, Some((4, numbers.len())));
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Put::Raw(id, bytes) => {
            head(*id, None);
            out.extend(bytes);
        }
    }
}
