"""Checkpoints that leave: their files under URLs that carry a signature instead of the API key."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from skyctl.tinker import files, records
from skyctl.tinker.bodies import Answer, checkpoint_path
from skyctl.tinker.ledger import Ledger

EXPIRE_S = 3600.0
ROUTE = "files/{name}/{file}"


@dataclass(frozen=True)
class ExternalFiles:
    """The files of external checkpoints."""

    ledger: Ledger
    """The database of checkpoints."""
    key: str = field(repr=False)
    """The API's key, with which URLs are signed."""

    async def urls(self, request: Request) -> Answer:
        """A URL for each file of a checkpoint."""
        path = checkpoint_path(request)
        row = await self.ledger.run(lambda c: records.checkpoint(c, path))
        if row["kind"] != "external":
            raise ValueError(f"{path} was not saved by save_weights_external")
        directory, expires = Path(row["directory"]), int(time.time() + EXPIRE_S)
        urls = {}
        for file in sorted(files.read_meta(directory)["files"]):
            place = ROUTE.format(name=directory.name, file=file)
            signed = f"expires={expires}&signature={self._signature(place, expires)}"
            urls[file] = f"{request.base_url}api/v1/{place}?{signed}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    async def download(self, request: Request) -> Response:
        """A file; the query has the signature."""
        name, file = request.path_params["name"], request.path_params["file"]
        text = request.query_params.get("expires", "")
        expires = int(text) if text.isdecimal() else 0
        signature = self._signature(ROUTE.format(name=name, file=file), expires)
        given = request.query_params.get("signature", "")
        if not hmac.compare_digest(signature.encode(), given.encode()) or expires < time.time():
            raise HTTPException(403, "the URL is not valid, or its time is over")
        row = await self.ledger.row(
            "SELECT directory FROM checkpoints WHERE kind = 'external' AND directory LIKE ?",
            f"%/{name}",
        )
        if row is None:
            raise HTTPException(404, "the checkpoint was deleted")
        return FileResponse(Path(row["directory"]) / file)

    def _signature(self, place: str, expires: int) -> str:
        return hmac.new(
            self.key.encode(), f"{place} {expires}".encode(), hashlib.sha256
        ).hexdigest()
