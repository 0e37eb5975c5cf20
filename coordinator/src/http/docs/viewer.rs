//! The page that shows the API document: Swagger UI, from `coordinator/assets/swagger-ui`. Nothing of it is fetched from
//! elsewhere.

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_ENCODING};
use actix_web::web::Path;

use crate::http::error::{ApiError, ErrorKind, Family};

/// Loads the two files beside it, and the document.
const PAGE: &str = r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<title>Baton</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js" charset="UTF-8"></script>
<script>
window.onload = () => SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null });
</script>
</body>
</html>
"##;
/// Both compressed with gzip, which every browser reads.
const SCRIPT: &[u8] = include_bytes!("../../../assets/swagger-ui/swagger-ui-bundle.js.gz");
const STYLE: &[u8] = include_bytes!("../../../assets/swagger-ui/swagger-ui.css.gz");

/// `GET /docs`.
pub async fn page() -> HttpResponse {
    HttpResponse::Ok().content_type("text/html; charset=utf-8").body(PAGE)
}

/// `GET /docs/{file}`: what the page loads.
pub async fn file(name: Path<String>) -> HttpResponse {
    let (kind, bytes) = match name.as_str() {
        "swagger-ui-bundle.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "swagger-ui.css" => ("text/css; charset=utf-8", STYLE),
        _ => {
            let error = ApiError::new(ErrorKind::UnknownPath, "there is no such file");
            return error.respond(Family::Tgi);
        }
    };
    HttpResponse::Ok()
        .content_type(kind)
        .insert_header((CONTENT_ENCODING, "gzip"))
        .insert_header((CACHE_CONTROL, "max-age=86400"))
        .body(bytes)
}
