//! A plain HTTP/1.1 client that hides nothing: it sends what it is given, byte by byte if need be, and shows what came.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// No answer of a test takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Header lines in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, without its chunks' borders.
    pub body: Vec<u8>,
}

impl Answer {
    /// The value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("status {}, not JSON: {}", self.status, self.text()))
    }

    /// The body of a 200 as JSON.
    pub fn ok(&self) -> Result<Value> {
        ensure!(self.status == 200, "status {}: {}", self.status, self.text());
        self.json()
    }

    /// The payloads of a 200 that is an event stream. Every line must be a `data:` line or a comment.
    pub fn events(&self) -> Result<Vec<String>> {
        ensure!(self.status == 200, "status {}: {}", self.status, self.text());
        let kind = self.header("content-type").unwrap_or_default();
        ensure!(kind.starts_with("text/event-stream"), "content type {kind}");
        let text = String::from_utf8(self.body.clone()).context("the event stream is not UTF-8")?;
        ensure!(
            text.is_empty() || text.ends_with("\n\n"),
            "the last event is not complete: {text:?}"
        );
        let lines = text
            .split("\n\n")
            .filter(|block| !block.is_empty() && !block.starts_with(':'));
        lines
            .map(|block| {
                Ok(block
                    .strip_prefix("data: ")
                    .with_context(|| format!("no event: {block:?}"))?
                    .to_owned())
            })
            .collect()
    }

    /// The payloads of an event stream as JSON, without a `[DONE]` at the end.
    pub fn json_events(&self) -> Result<Vec<Value>> {
        let mut events = self.events()?;
        if events.last().is_some_and(|event| event == "[DONE]") {
            events.pop();
        }
        events
            .iter()
            .map(|event| serde_json::from_str(event).with_context(|| format!("not JSON: {event}")))
            .collect()
    }
}

/// A connection to a server on this machine.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    /// Bytes that came after the last answer.
    ahead: Vec<u8>,
}

impl Wire {
    /// Connects.
    pub fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            ahead: Vec::new(),
        })
    }

    /// The socket.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// True if the server has said something, or has closed.
    pub fn has_answer(&self) -> Result<bool> {
        self.stream.set_nonblocking(true)?;
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false)?;
        Ok(!matches!(peeked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock))
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> Result<()> {
        Ok(self.stream.write_all(bytes.as_ref())?)
    }

    /// Sends bytes to a server that may have closed already: what it said before is still there to be read.
    pub fn send_if_open(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Says that nothing more will be sent.
    pub fn close_sending(&self) -> Result<()> {
        Ok(self.stream.shutdown(Shutdown::Write)?)
    }

    /// Reads one answer and leaves the connection as it is.
    pub fn answer(&mut self) -> Result<Answer> {
        let mut answer = self.head()?;
        if (100..200).contains(&answer.status) || matches!(answer.status, 204 | 304) {
            return Ok(answer);
        }
        let chunked = answer
            .header("transfer-encoding")
            .is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
        let length = answer.header("content-length").map(str::parse::<usize>).transpose()?;
        answer.body = match length {
            _ if chunked => self.chunks()?,
            Some(length) => self.take(length)?,
            None => self.rest()?,
        };
        Ok(answer)
    }

    /// Reads the head of an answer; its body follows.
    pub fn head(&mut self) -> Result<Answer> {
        let status_line = self.line()?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.with_context(|| format!("not a status line: {status_line:?}"))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(Answer {
                    status,
                    headers,
                    body: Vec::new(),
                });
            }
            let (name, value) = line
                .split_once(':')
                .with_context(|| format!("not a header: {line:?}"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// Reads until the server closes. A reset is an end too.
    pub fn rest(&mut self) -> Result<Vec<u8>> {
        let mut bytes = std::mem::take(&mut self.ahead);
        match self.stream.read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(bytes),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads at least one byte and at most `most`; fewer than one means that the server has closed.
    pub fn some(&mut self, most: usize) -> Result<Vec<u8>> {
        if self.ahead.is_empty() {
            let mut bytes = vec![0; most];
            let read = self.stream.read(&mut bytes)?;
            bytes.truncate(read);
            return Ok(bytes);
        }
        let count = self.ahead.len().min(most);
        Ok(self.ahead.drain(..count).collect())
    }

    /// Puts bytes that have been read back in front of what follows.
    pub fn put_back(&mut self, bytes: &[u8]) {
        self.ahead.splice(..0, bytes.iter().copied());
    }

    fn take(&mut self, count: usize) -> Result<Vec<u8>> {
        while self.ahead.len() < count {
            self.more()?;
        }
        Ok(self.ahead.drain(..count).collect())
    }

    fn line(&mut self) -> Result<String> {
        loop {
            if let Some(end) = self.ahead.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.take(end + 2)?;
                return Ok(String::from_utf8(line[..end].to_vec())?);
            }
            self.more()?;
        }
    }

    fn chunks(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.line()?;
            let size = usize::from_str_radix(&line, 16).with_context(|| format!("not a chunk size: {line:?}"))?;
            body.extend(self.take(size)?);
            let border = self.take(2)?;
            ensure!(border == b"\r\n", "a chunk of {size} bytes is followed by {border:?}");
            if size == 0 {
                return Ok(body);
            }
        }
    }

    fn more(&mut self) -> Result<()> {
        let mut bytes = [0; 16_384];
        match self.stream.read(&mut bytes)? {
            0 => bail!("the server closed after {:?}", String::from_utf8_lossy(&self.ahead)),
            count => self.ahead.extend_from_slice(&bytes[..count]),
        }
        Ok(())
    }
}

/// The bytes of a request with a JSON body, on a connection that stays open.
pub fn post_bytes(path: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    request_bytes("POST", path, "content-type: application/json\r\n", body)
}

/// The bytes of a request with further header lines, each ended by CRLF.
pub fn request_bytes(method: &str, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}
