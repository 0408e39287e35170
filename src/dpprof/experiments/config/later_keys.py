"""Keys that came after the first results: left out where they are not given."""

from typing import Any, ClassVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class HasLaterKeys(BaseModel):
    """Part of an experiment whose dump, and so the experiment's id, is as before some keys came."""

    later: ClassVar[tuple[str, ...]]
    """These keys. One is left out where it has its default."""

    @model_serializer(mode="wrap")
    def _leave_out(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        defaults = {name: type(self).model_fields[name].default for name in self.later}
        return {k: v for k, v in fields.items() if k not in defaults or v != defaults[k]}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of the fields, which that serializer would hide."""
        return handler(_without_serializer(schema))


def _without_serializer(schema: Any) -> Any:
    """Leave out a model's serializer; validators are around it, one in the other."""
    found = {key: one for key, one in schema.items() if key != "serialization"}
    if found["type"].startswith("function"):
        found["schema"] = _without_serializer(found["schema"])
    return found
