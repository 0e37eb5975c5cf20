//! A plain HTTP/1.1 client that hides nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// No answer of a test takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// An answer.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The payloads of an event stream.
    pub fn events(&self) -> Vec<&str> {
        let blocks = self
            .text()
            .split("\n\n")
            .filter(|block| !block.is_empty() && !block.starts_with(':'));
        blocks
            .map(|block| {
                block
                    .strip_prefix("data: ")
                    .unwrap_or_else(|| panic!("no event: {block:?}"))
            })
            .collect()
    }

    /// The payloads of an event stream as JSON, without `[DONE]`.
    pub fn json_events(&self) -> Vec<Value> {
        let events = self.events().into_iter().filter(|event| *event != "[DONE]");
        events
            .map(|event| serde_json::from_str(event).unwrap_or_else(|error| panic!("{error}: {event}")))
            .collect()
    }
}

/// Opens a connection.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// The bytes of a request with a JSON body.
pub fn post_bytes(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Sends raw bytes and reads until the server closes.
pub fn exchange(address: SocketAddr, request: &[u8]) -> Response {
    let mut stream = connect(address);
    stream.write_all(request).expect("sent");
    read_all(&mut stream)
}

/// Reads an answer until the server closes.
pub fn read_all(stream: &mut TcpStream) -> Response {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer, and then the end");
    parse(&bytes)
}

/// Posts JSON.
pub fn post(address: SocketAddr, path: &str, body: impl AsRef<[u8]>) -> Response {
    exchange(address, &post_bytes(path, body.as_ref()))
}

/// Sends a request without a body, with further header lines (each ended by CRLF).
pub fn request(address: SocketAddr, method: &str, path: &str, headers: &str) -> Response {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{headers}\r\n");
    exchange(address, head.as_bytes())
}

/// Gets a path.
pub fn get(address: SocketAddr, path: &str) -> Response {
    request(address, "GET", path, "")
}

fn parse(bytes: &[u8]) -> Response {
    let split = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let split = split.unwrap_or_else(|| panic!("no head: {}", String::from_utf8_lossy(bytes)));
    let head = std::str::from_utf8(&bytes[..split]).expect("a text head");
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .and_then(|code| code.parse().ok());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect();
    let rest = &bytes[split + 4..];
    let chunked = headers
        .iter()
        .any(|(name, value)| name.eq_ignore_ascii_case("transfer-encoding") && value == "chunked");
    let body = if chunked { unchunk(rest) } else { rest.to_vec() };
    Response {
        status: status.expect("a status"),
        headers,
        body,
    }
}

fn unchunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = rest
            .windows(2)
            .position(|window| window == b"\r\n")
            .expect("a chunk's size");
        let size = std::str::from_utf8(&rest[..line])
            .ok()
            .and_then(|size| usize::from_str_radix(size, 16).ok());
        let size = size.expect("a hexadecimal size");
        rest = &rest[line + 2..];
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}
